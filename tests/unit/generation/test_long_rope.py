"""Models whose rotary frequencies depend on the length of the call: each answer is the stock model's, or refused."""

import concurrent.futures
from dataclasses import replace

import pytest
import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import GenerationError, PlanConflictError, PromptTooLongError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.batch_invariance import PassRows
from rag_posfix.generation.model.one_pass import AnsweredPrompt, forward_with_answers
from rag_posfix.generation.model.sequence_batch import forward_batches
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import Overrides
from rag_posfix.patching.install import install
from rag_posfix.plan.plan import Capability, Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import loaded_model, stock_model, toy_layout

WINDOW = 48
CONTEXT = 512
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
CONFIG = {"rope_parameters": ROPE, "original_max_position_embeddings": WINDOW}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
SLIDING = [None, CONTEXT, 2 * CONTEXT]  # Phi-3.5 and Phi-4-mini have twice their context

BELOW = toy_layout()  # 39 tokens
AT = toy_layout((7, 4, 9, 15))  # 48
BEYOND = toy_layout((7, 4, 9, 6, 11, 8, 13))  # 71: a passage alone is short


def long_rope(sliding_window=None):
    return loaded_model("phi3", sliding_window=sliding_window, **CONFIG)


@pytest.fixture(scope="module", params=SLIDING)
def loaded(request):
    return long_rope(request.param)


@pytest.fixture(scope="module")
def unslid():
    return long_rope()


@pytest.fixture(scope="module")
def stock():
    return stock_model("phi3", **CONFIG)


def engine_of(loaded, stored=True):
    store = PassageStore([MemoryTier()]) if stored else None
    return Engine(loaded, NumberEncoder(), "tiny", "print", passages=store)


def request(layout, max_tokens, name="none"):
    choice = MitigationChoice(name, dict(MITIGATIONS.get(name).example))
    return GenerationRequest(layout, choice, Sampling(max_tokens=max_tokens))


def stock_answer(stock, layout, count):
    ids = torch.tensor([layout.token_ids])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return tuple(said[0, ids.shape[1] :].tolist())


def stock_log_probs(stock, tokens):
    with torch.inference_mode():
        return stock(torch.tensor([tokens])).logits[0, -1].log_softmax(dim=-1)


def assert_as_stock(engine, stock, layout, count):
    """Compare the distribution after every token of the answer with that of the stock model over the whole text."""
    session = engine.open(layout, MitigationChoice(), count)
    answer = stock_answer(stock, layout, count)
    for step in range(count):
        expected = stock_log_probs(stock, (*layout.token_ids, *answer[:step]))
        assert float((session.next_log_probs() - expected).abs().max()) < 1e-4, step
        session.advance(answer[step])


@pytest.mark.parametrize(("layout", "count"), [(BELOW, 10), (AT, 1), (BEYOND, 8)], ids=["below", "at", "beyond"])
@pytest.mark.parametrize("stored", [False, True], ids=["alone", "store"])
def test_each_token_of_an_answer_is_the_stock_models_below_at_and_beyond_the_window(
    loaded, stock, layout, count, stored
):
    engine = engine_of(loaded, stored)
    assert_as_stock(engine, stock, layout, count)
    assert_as_stock(engine, stock, layout, count)  # warm, where there is a store


def test_the_two_sets_of_frequencies_differ_by_more_than_rounding(stock):
    # Else the tests above could not fail: the same tokens, read at the end of a longer prompt and alone.
    frequencies = stock.model.rotary_emb
    one = torch.zeros(1, 1, 1)
    short, long = (frequencies(one, torch.tensor([[5, last]]))[0][0, 0] for last in (WINDOW - 1, WINDOW))
    assert float((short - long).abs().max()) > 0.1


@pytest.mark.parametrize(("used", "allowed"), [(39, 10), (48, 1)])
def test_an_answer_that_may_cross_the_window_is_refused_with_the_largest_max_tokens(loaded, used, allowed):
    # 39 + 10 = 49, of which the last is not read: 48 positions.
    layout = BELOW if used == 39 else AT
    engine = engine_of(loaded)
    told = f"takes {used} tokens and max_tokens={allowed + 1} leads beyond 48, .* set max_tokens to at most {allowed},"
    with pytest.raises(PromptTooLongError, match=told):
        engine.generate(request(layout, allowed + 1))
    assert len(engine.generate(request(layout, allowed)).token_ids) == allowed


def test_a_passage_kept_by_a_short_prompt_is_not_joined_into_a_long_one(unslid, stock):
    engine = engine_of(unslid)
    assert_as_stock(engine, stock, BELOW, 4)
    assert_as_stock(engine, stock, BEYOND, 4)  # begins with the same prefix and passages
    assert_as_stock(engine, stock, BELOW, 4)


@pytest.mark.parametrize("least_rows", [1, 5])
def test_decode_steps_that_short_and_long_answers_share_have_the_stock_models_distributions(loaded, stock, least_rows):
    engine = engine_of(replace(loaded, pass_rows=PassRows(least_rows)))  # 5: three rows of padding
    layouts = [BELOW, BEYOND, AT]
    steps = {0: 9, 1: 9, 2: 0}
    sessions = [engine.open(layout, MitigationChoice(), steps[i] + 1) for i, layout in enumerate(layouts)]
    going = [i for i in steps if steps[i]]
    batches = [sessions[i].batches[0] for i in going]
    read = [list(layouts[i].token_ids) for i in going]
    with torch.inference_mode():
        for token in range(5, 14):
            logits = forward_batches(batches, [torch.tensor([[token]])] * 2, 1)
            for tokens, found in zip(read, logits, strict=True):
                tokens.append(token)
                expected = stock_log_probs(stock, tokens)
                assert float((found[0, -1].log_softmax(dim=-1) - expected).abs().max()) < 1e-4


@pytest.mark.slow
def test_three_threads_with_short_and_long_prompts_get_the_stock_models_answers(loaded, stock):
    engine = engine_of(loaded)
    layouts = [toy_layout((7, 4), seed=1), BEYOND, toy_layout((30, 40), seed=2)]
    expected = [stock_answer(stock, layout, 4) for layout in layouts]

    def ask(thread):
        return [engine.generate(request(layouts[(thread + i) % 3], 4)).token_ids for i in range(25)]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for thread, answers in enumerate(pool.map(ask, range(3))):
            assert answers == [expected[(thread + i) % 3] for i in range(25)]


def test_no_pass_writes_frequencies_on_the_module_that_threads_share(loaded):
    rotary = loaded.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    engine = engine_of(loaded)
    for layout in (BEYOND, BELOW, BEYOND):
        engine.generate(request(layout, 3))
        assert torch.equal(rotary.inv_freq, before)


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_every_method_answers_beyond_the_window_alike_with_and_without_kept_passages(unslid, name):
    engine, alone = engine_of(unslid), engine_of(unslid, stored=False)
    # 70 tokens; the 24 that passage_answers drafts after its longest row of 25 stay within the window.
    layout = toy_layout((7, 4, 9, 6, 11, 8, 13), suffix=7, relevance=(0.9, 0.2, 0.5, 0.4, 0.3, 0.1, 0.7))
    choice = request(layout, 3, name).mitigation
    cold, warm, without = (one.open(layout, choice, 3).next_log_probs() for one in (engine, engine, alone))
    assert float((cold - warm).abs().max()) < 1e-4
    assert float((cold - without).abs().max()) < 1e-4


def test_rotation_in_the_hook_has_the_frequencies_of_the_call(loaded, stock):
    turned = Plan(rows=(RowPlan(head_scale=lambda layer, query, key: None),))
    for layout in (BELOW, BEYOND):
        found = Session(loaded.reading(len(layout.token_ids)), layout, turned).next_log_probs()
        assert float((found - stock_log_probs(stock, layout.token_ids)).abs().max()) < 1e-4


def test_a_prompt_is_never_begun_with_the_frequencies_of_another_length(loaded):
    with pytest.raises(GenerationError, match="positions up to 70 was begun with the frequencies of the original"):
        Session(loaded, BEYOND, Plan())


@pytest.mark.parametrize("layout", [BELOW, BEYOND], ids=["below", "beyond"])
def test_a_prompt_with_its_answer_is_read_in_one_pass_as_the_stock_model_reads_it(loaded, stock, layout):
    positions = torch.arange(len(layout.token_ids), dtype=torch.float32)[None]
    part = AnsweredPrompt(layout.token_ids, positions, Overrides(), (5, 9))
    with torch.inference_mode():
        (found,) = forward_with_answers(loaded, [part])
        expected = stock(torch.tensor([[*layout.token_ids, 5, 9]])).logits[0, -3:-1]
    assert float((found - expected).abs().max()) < 1e-4
    with pytest.raises(PlanConflictError, match="LongRoPE, cannot be packed with others"):
        forward_with_answers(loaded, [part, part])


def test_rerankers_read_prompts_beyond_the_window_with_its_frequencies(loaded, stock):
    span = toy_layout((60,), suffix=8)
    engine = engine_of(loaded)
    (found,) = engine.question_likelihood(span)
    with torch.inference_mode():
        scores = stock(torch.tensor([span.token_ids])).logits[0].log_softmax(dim=-1)
    places = range(span.question.start, span.question.stop)
    expected = sum(float(scores[i - 1, span.token_ids[i]]) for i in places) / len(places)
    assert found == pytest.approx(expected, abs=1e-4)
    ((kept,),), ((computed,),) = (one.question_attention([span]) for one in (engine, engine_of(loaded, stored=False)))
    assert kept == pytest.approx(computed, abs=1e-5)


class TestDynamicScaling:
    """Dynamic NTK scaling leaves the frequencies alone within the context window, and beyond it nothing is served."""

    def test_answers_within_the_window_are_those_of_the_stock_model(self):
        loaded, stock = loaded_model(**DYNAMIC, max_position_embeddings=64), stock_model(**DYNAMIC)
        engine = engine_of(loaded)
        assert_as_stock(engine, stock, BELOW, 25)
        assert loaded.spec.shape.capabilities == frozenset(Capability)

    def test_beyond_the_window_it_is_refused(self):
        engine = engine_of(loaded_model(**DYNAMIC, max_position_embeddings=64))
        with pytest.raises(PromptTooLongError, match="the context window is 64"):
            engine.generate(request(BELOW, 26))

    def test_frequencies_that_a_longer_prompt_has_left_on_the_model_are_reset(self):
        model = stock_model(**DYNAMIC, max_position_embeddings=32)
        model(torch.tensor([toy_layout().token_ids]))  # 39 tokens: the module now has other frequencies
        before = model.model.rotary_emb.inv_freq.clone()
        install(model)
        rotary = model.model.rotary_emb
        assert not torch.equal(rotary.inv_freq, before)
        assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)
