"""What a question attends to: equal to the stock model's own attention, and read in two short passes."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from rag_posfix.attention.masks import last_query_attention
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, PlanConflictError, PromptTooLongError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.decode import question_scores
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.decode.question_scores import (
    AnswerText,
    AttributionTracker,
    attribution_layers,
    first_token_log_probs,
    question_attention,
    question_likelihood,
    write_candidates,
)
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill import per_passage
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.layout import Span
from rag_posfix.plan.plan import Draft, Plan, RowPlan
from tests.support.number_encoder import NumberEncoder
from tests.support.stepped import RecordingEngine
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards
from tests.unit.generation.together import generate_together

LAYOUT = toy_layout()
T, AT = len(LAYOUT.token_ids), LAYOUT.suffix.start


def asking(*suffix):
    """The same passages with another suffix."""
    return dataclasses.replace(
        LAYOUT,
        token_ids=(*LAYOUT.token_ids[:AT], *suffix),
        suffix=Span(AT, AT + len(suffix)),
        question=Span(AT + 1, AT + len(suffix)),
    )


OTHER = asking(7, 9, 30)


def eager(family, layout, layers=slice(None), **overrides):
    """The same from all attention matrices of the model as it comes: (layers, heads, T, T)."""
    model = stock_model(family, **overrides)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([layout.token_ids]), output_attentions=True, use_cache=False)
    attention = torch.stack(output.attentions)[:, 0]
    paid = attention[layers, :, layout.suffix.slice].mean(dim=2).sum(dim=(0, 1))
    return [paid[span.slice].tolist() for span in layout.passages]


def engine_of(loaded, store=None):
    return Engine(loaded, NumberEncoder(), "tiny", "print", passages=store)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_stock_models_attention_matrices_say(family):
    for layout, found in zip([LAYOUT, OTHER], question_attention(loaded_model(family), [LAYOUT, OTHER]), strict=True):
        for one, expected in zip(found, eager(family, layout), strict=True):
            assert one == pytest.approx(expected, abs=2e-6)


def test_layers_and_heads_that_are_named_are_summed(loaded):
    (found,) = question_attention(loaded, [LAYOUT], layers=(2, 0))
    for one, expected in zip(found, eager("llama", LAYOUT, [0, 2]), strict=True):
        assert one == pytest.approx(expected, abs=2e-6)
    # Every head of the same two layers.
    heads = [(layer, head) for layer in (2, 0) for head in range(8)]
    (by_head,) = question_attention(loaded, [LAYOUT], heads=heads)
    for one, other in zip(found, by_head, strict=True):
        assert one == pytest.approx(other, abs=2e-6)


@pytest.mark.parametrize(
    "chosen",
    [
        {"layers": ()}, {"layers": (-1,)}, {"layers": (0, 3)}, {"heads": ()}, {"heads": [(3, 0)]}, {"heads": [(0, 8)]},
        {"heads": [(-1, 0)]}, {"heads": [(0, -1)]},
    ],
)  # fmt: skip
def test_a_layer_or_head_that_the_model_does_not_have_is_refused(loaded, chosen):
    with pytest.raises(ConfigError, match="layers, 0 to 2" if "layers" in chosen else "layers 0 to 2, heads 0 to 7"):
        question_attention(loaded, [LAYOUT], **chosen)


def test_layers_that_forget_keys_are_read_whole_and_say_the_same():
    window = {"sliding_window": 12}
    loaded = loaded_model("mistral", **window)
    assert not loaded.keeps_all_keys
    found = question_attention(loaded, [LAYOUT, OTHER])
    for layout, passages in zip([LAYOUT, OTHER], found, strict=True):
        for one, expected in zip(passages, eager("mistral", layout, **window), strict=True):
            assert one == pytest.approx(expected, abs=2e-6)
    assert set(found[0][0][:4]) == {0.0}, "no layer sees the first passage from the question"


def test_passages_are_read_once_and_each_question_in_one_short_pass(loaded, passes):
    engine_of(loaded).question_attention([LAYOUT, OTHER, LAYOUT])
    assert passes == [AT, T - AT, 3, T - AT]


def test_what_the_store_holds_is_not_read_again_and_says_the_same(loaded, passes):
    store = PassageStore([MemoryTier()])
    engine = engine_of(loaded, store)
    cold = engine.question_attention([LAYOUT])
    # Prefix and first passage, each in whole tiles; the other passages; the question.
    everything = [per_passage.TILE, per_passage.TILE, AT - LAYOUT.passages[0].stop, T - AT]
    assert passes == everything
    passes.clear()
    assert engine.question_attention([LAYOUT]) == cold
    assert passes == [T - AT]
    passes.clear()
    request = GenerationRequest(LAYOUT, MitigationChoice("none"), Sampling(max_tokens=1))
    assert engine.generate(request).usage.cached_tokens == AT, "an answer of the unmodified model finds them too"
    assert engine.question_attention([LAYOUT], salt="another tenant") == cold
    assert passes[1:] == everything


def test_prompts_that_differ_before_their_suffix_are_refused(loaded):
    with pytest.raises(ConfigError, match="2 prompts differ before their suffix"):
        question_attention(loaded, [LAYOUT, toy_layout(seed=1)])
    assert question_attention(loaded, []) == []


def test_it_can_be_stopped_between_two_questions(loaded, passes):
    calls = []

    def check():
        calls.append(len(passes))
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine_of(loaded).question_attention([LAYOUT, OTHER], check=check)
    assert calls == [1, 2]
    assert passes == [AT, T - AT]


def test_a_prompt_beyond_the_context_window_is_refused_before_any_work(loaded, passes):
    engine, long = engine_of(loaded), toy_layout((600,))
    asked = (engine.question_likelihood, long), (engine.question_attention, [long]), (engine.passage_attention, [long])
    for function, given in asked:
        with pytest.raises(PromptTooLongError, match="613 tokens exceeds the context window of 512"):
            function(given)
    assert passes == []


def test_a_model_that_is_split_is_refused(loaded):
    split = LoadedModel(loaded.model, dataclasses.replace(loaded.spec, ranks=Ranks(2, 0, None)))
    with pytest.raises(UnsupportedModelError, match="split over 2 processes"):
        engine_of(split).question_attention([LAYOUT])


def test_a_batching_generator_hands_it_on_or_says_that_it_cannot(loaded):
    engine = engine_of(loaded)
    batching = BatchingGenerator(engine)
    assert "attention" in engine.capabilities & batching.capabilities
    assert batching.question_attention([LAYOUT]) == engine.question_attention([LAYOUT])
    assert batching.question_likelihood(LAYOUT) == engine.question_likelihood(LAYOUT)
    assert batching.passage_attention([LAYOUT]) == engine.passage_attention([LAYOUT])
    with pytest.raises(UnsupportedModelError, match="RecordingEngine reads no passages"):
        BatchingGenerator(RecordingEngine()).question_likelihood(LAYOUT)


def test_passage_attention_is_the_mean_per_token_of_the_last_row(loaded):
    model = stock_model()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor([LAYOUT.token_ids]), output_attentions=True)
    last = torch.stack(output.attentions)[:, 0, :, -1].mean(dim=(0, 1))
    expected = [float(last[span.slice].mean()) for span in LAYOUT.passages]
    assert engine_of(loaded).passage_attention([LAYOUT])[0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("count", [1, 3, 70])
def test_several_queries_are_averaged_causally_block_by_block(count):
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn((2, heads, n, 4), generator=generator) for heads, n in ((4, 70), (2, 80)))
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.5
    seen = torch.arange(80) <= torch.arange(10, 80)[:, None]
    expected = scores.masked_fill(~seen, float("-inf")).softmax(-1)[:, :, -count:].mean(dim=(1, 2))
    assert torch.allclose(last_query_attention(query, key, None, 0.5, count=count), expected, atol=1e-6)
    for mask in (seen[None, None], torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]):
        assert torch.allclose(last_query_attention(query, key, mask, 0.5, count=count), expected, atol=1e-6)


def test_padding_in_front_gets_nothing():
    query, key = torch.ones((2, 1, 2, 4)), torch.ones((2, 1, 5, 4))
    found = last_query_attention(query, key, None, 1.0, starts=(0, 3), count=2)
    # Row 0: 4 and 5 keys, evenly. Row 1: keys 3, and 3 with 4: (1 + 1/2) / 2 and (0 + 1/2) / 2.
    assert found[0].tolist() == pytest.approx([(1 / 4 + 1 / 5) / 2] * 4 + [1 / 10])
    assert found[1].tolist() == pytest.approx([0, 0, 0, 0.75, 0.25])


@pytest.mark.parametrize(("asked", "expected"), [({"layers": [0]}, []), ({"heads": [(1, 2)]}, [0]), ({}, [0, 1])])
def test_layers_after_the_last_one_that_counts_do_not_run(loaded, asked, expected):
    read = []
    handles = [
        layer.mlp.register_forward_hook(lambda module, arguments, output, number=number: read.append(number))
        for number, layer in enumerate(loaded.model.model.layers)
    ]
    question_attention(loaded, [LAYOUT, OTHER], **asked)
    for handle in handles:
        handle.remove()
    # Passages once, each suffix once. The perceptron of the last layer that counts gives nothing that is looked at.
    assert read == expected * 3


def test_what_the_store_keeps_is_read_in_all_layers(loaded):
    store = PassageStore([MemoryTier(1 << 20)])
    engine = engine_of(loaded, store)
    short = engine.question_attention([LAYOUT], layers=[0])
    assert short == engine_of(loaded).question_attention([LAYOUT], layers=[0])
    request = GenerationRequest(LAYOUT, MitigationChoice("none"), Sampling(max_tokens=3))
    assert engine.generate(request).token_ids == engine_of(loaded).generate(request).token_ids


# How likely a passage makes the question: equal to the stock model's own log-probabilities.


def plain(family, layout, passage, **overrides):
    """Mean log p of the question's tokens in prefix + passage + suffix, from one forward pass of the stock model."""
    alone = layout.select((passage,))
    with torch.no_grad():
        logits = stock_model(family, **overrides)(torch.tensor([alone.token_ids])).logits[0]
    said = logits.log_softmax(dim=-1)
    question = alone.question
    values = [float(said[at - 1, alone.token_ids[at]]) for at in range(question.start, question.stop)]
    return sum(values) / len(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_stock_model_says_of_each_passage_alone(family):
    found = question_likelihood(loaded_model(family), LAYOUT)
    assert found == pytest.approx([plain(family, LAYOUT, passage) for passage in range(4)], abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_question_at_the_start_of_the_suffix_is_scored_without_its_first_token(family):
    """That token is predicted where the passage ends, which is read apart and may be stored."""
    layout = replace(LAYOUT, question=Span(LAYOUT.suffix.start, LAYOUT.suffix.stop - 2))
    scored = replace(LAYOUT, question=Span(LAYOUT.suffix.start + 1, LAYOUT.suffix.stop - 2))
    expected = pytest.approx([plain(family, scored, passage) for passage in range(4)], abs=1e-5)
    assert question_likelihood(loaded_model(family), layout) == expected
    engine = Engine(loaded_model(family), NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    assert [engine.question_likelihood(layout) for _ in range(2)] == [expected] * 2
    single = replace(LAYOUT, question=Span(LAYOUT.suffix.start, LAYOUT.suffix.start + 1))
    assert question_likelihood(loaded_model(family), single) == (0.0,) * 4, "nothing of it can be scored"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_long_question_is_scored_in_parts(family, monkeypatch):
    """The logits of few tokens are held at once; the parts do not depend on what the store holds."""
    layout, loaded = toy_layout(suffix=40), loaded_model(family)
    whole = question_likelihood(loaded, layout)
    monkeypatch.setattr(
        per_passage, "MAX_SCORE_ELEMENTS", 7 * 4 * loaded.model.config.vocab_size
    )  # 7 tokens in four rows
    kept = []
    handle = loaded.model.register_forward_hook(lambda _, given, output: kept.append(output.logits.shape[:2].numel()))
    assert question_likelihood(loaded, layout) == pytest.approx(whole, abs=1e-5)
    handle.remove()
    assert max(kept) == 7 * 4
    engine = Engine(loaded, NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    assert engine.question_likelihood(layout) == engine.question_likelihood(layout) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("stored", [False, True])
def test_a_committee_reads_a_long_question_in_parts(stored, monkeypatch):
    layout, loaded = toy_layout(suffix=40, relevance=(0.9, 0.2, 0.5, 0.4)), loaded_model()

    def answer(store):
        engine = Engine(loaded, NumberEncoder(), "tiny", "print", passages=store)
        session = engine.open(layout, MitigationChoice("committee"), 4)
        return session.next_log_probs()

    whole, store = answer(None), PassageStore([MemoryTier()]) if stored else None
    monkeypatch.setattr(per_passage, "MAX_SCORE_ELEMENTS", 7 * loaded.model.config.vocab_size)
    cold = answer(store)
    assert torch.allclose(cold, whole, atol=1e-4)
    assert torch.equal(answer(store), cold)


def test_layers_that_forget_keys_say_the_same():
    window = {"sliding_window": 12}
    found = question_likelihood(loaded_model("mistral", **window), LAYOUT)
    assert found == pytest.approx([plain("mistral", LAYOUT, passage, **window) for passage in range(4)], abs=1e-5)


def test_the_question_alone_is_what_the_stock_model_says_of_it_without_a_passage():
    alone = LAYOUT.select(())
    with torch.no_grad():
        logits = stock_model("llama")(torch.tensor([alone.token_ids])).logits[0].log_softmax(dim=-1)
    span = alone.question
    values = [float(logits[at - 1, alone.token_ids[at]]) for at in range(span.start, span.stop)]
    *passages, bare = question_likelihood(loaded_model("llama"), LAYOUT, bare=True)
    assert passages == pytest.approx(question_likelihood(loaded_model("llama"), LAYOUT), abs=1e-5)
    assert bare == pytest.approx(sum(values) / len(values), abs=1e-5)


def test_no_passages_have_no_likelihood():
    assert question_likelihood(loaded_model(), toy_layout(())) == ()


def test_passages_are_shared_with_answers_whose_methods_read_them_apart():
    loaded = loaded_model()
    engine = Engine(loaded, NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    cold = engine.question_likelihood(LAYOUT)
    with CountedForwards(engine) as forwards:
        assert engine.question_likelihood(LAYOUT) == cold
    assert forwards.shapes == [(4, len(LAYOUT.suffix))], "the suffix in four rows and nothing else"
    request = GenerationRequest(LAYOUT, MitigationChoice("context_experts"), Sampling(max_tokens=1))
    assert engine.generate(request).usage.cached_tokens == LAYOUT.suffix.start


@pytest.mark.parametrize("family", FAMILIES)
def test_first_tokens_are_those_of_the_stock_model_with_each_passage_alone_and_with_none(family):
    tokens = (3, 17, 5)
    per_passage = first_token_log_probs(loaded_model(family), LAYOUT, tokens)
    expected = []
    for passages in ((0,), (1,), (2,), (3,), ()):
        ids = torch.tensor([LAYOUT.select(passages).token_ids])
        with torch.no_grad():
            logits = stock_model(family)(ids).logits[0, -1]
        expected.append(logits.log_softmax(dim=-1)[list(tokens)].tolist())
    assert [list(row) for row in per_passage] == [pytest.approx(row, abs=1e-5) for row in expected]


def test_first_tokens_are_the_same_from_stored_passages_and_beside_answers():
    engine = Engine(loaded_model(), NumberEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    cold = engine.first_token_log_probs(LAYOUT, (3, 17))
    assert engine.first_token_log_probs(LAYOUT, (3, 17)) == cold
    with closing(BatchingGenerator(engine)) as batching:
        assert batching.first_token_log_probs(LAYOUT, (3, 17)) == cold


# Which passages tokens come from: what the trace says, that it changes no answer, and where it is silent.


RANKED = toy_layout(relevance=(0.9, 0.2, 0.5, 0.4))
TOKENS = 5
SECOND = torch.tensor([0.0, 1.0])


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(), NumberEncoder(), "tiny", "print")


def request(name, attribution=True, layout=RANKED):
    choice = MitigationChoice(name, dict(MITIGATIONS.get(name).example))
    return GenerationRequest(layout, choice, Sampling(max_tokens=TOKENS), attribution=attribution)


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_every_method_says_where_each_token_comes_from_and_answers_as_without(engine, name):
    plain, traced = engine.generate(request(name, attribution=False)), engine.generate(request(name))
    assert plain.sources == ()
    assert (traced.text, traced.token_ids, traced.attention) == (plain.text, plain.token_ids, plain.attention)
    assert len(traced.sources) == len(traced.token_ids) == TOKENS
    assert traced.sources[-1].end == len(traced.text)
    for source in traced.sources:
        assert len(source.shares) == RANKED.n_passages
        assert all(share >= 0 for share in source.shares)
        assert sum(source.shares) == pytest.approx(1.0, abs=1e-5)


def test_sources_end_with_the_text_that_a_stop_string_has_cut(engine):
    ids = engine.generate(request("none")).token_ids
    sampling = Sampling(max_tokens=TOKENS, stop=(f",{ids[1]},{ids[2]},",))
    cut = engine.generate(replace(request("none"), sampling=sampling))
    first = len(str(ids[0]))
    assert cut.text == str(ids[0])
    assert [source.end for source in cut.sources] == [first] * 3, "the comma of the first token is cut too"


def test_the_first_token_comes_from_where_the_prompt_looked(engine):
    for name in ("none", "parallel_encoding", "context_experts"):
        session = engine.open(RANKED, request(name).mitigation, TOKENS)
        session.attribute_tokens()
        session.next_log_probs()
        (first,) = session.token_shares()
        total = sum(first)
        assert tuple(share / total for share in first) == pytest.approx(session.attention())


def test_the_shares_of_rows_are_summed_by_their_weights(engine):
    # Two rows of all passages, weights 3/4 and 1/4:
    # .75 * (.4, .4, .2, 0) + .25 * (0, .2, .2, .6) = (.3, .35, .2, .15).
    # Then 0 and 1: what the second row attends to. The weights of the last call before a token is taken count.
    session = engine.open(RANKED, MitigationChoice("multi_base", {"factors": (1.0, 1.9)}), TOKENS)
    tracker = AttributionTracker(session.batches, torch.tensor([(0.4, 0.4, 0.2, 0.0), (0.0, 0.2, 0.2, 0.6)]))
    tracker.weigh_rows(torch.tensor([1.0, 0.0]))
    tracker.weigh_rows(torch.tensor([0.75, 0.25]))
    tracker.take(())
    tracker.weigh_rows(torch.tensor([0.0, 1.0]))
    assert tracker.shares() == [pytest.approx((0.3, 0.35, 0.2, 0.15)), pytest.approx((0.0, 0.2, 0.2, 0.6))]


@pytest.mark.parametrize("layout", [RANKED, toy_layout((7, 4))], ids=["four passages", "two passages"])
def test_the_shares_are_those_of_the_plain_attention(engine, layout):
    """Compared with attention that transformers computes spelled out, in the layers that are watched."""
    generation = engine.generate(request("none", layout=layout))
    model = loaded_model().model
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*layout.token_ids, *generation.token_ids[:-1]]])
    with torch.inference_mode():
        attentions = model(ids, output_attentions=True).attentions
    layers = sorted(attribution_layers(len(attentions)))
    for number, source in enumerate(generation.sources[1:], start=1):
        at = len(layout.token_ids) - 1 + number
        row = torch.stack([attentions[layer][0, :, at].mean(dim=0) for layer in layers]).mean(dim=0)
        mass = torch.stack([row[span.slice].sum() for span in layout.passages])
        assert source.shares == pytest.approx((mass / mass.sum()).tolist(), abs=1e-5)


def test_each_row_of_a_batch_has_the_passages_of_its_own_tokens():
    # Two rows of one batch: passages of 7 and 4 tokens, and of 6 and 5; the second row writes.
    loaded, layout = loaded_model(), toy_layout((7, 4, 6, 5))
    rows = (RowPlan(passages=(0, 1)), RowPlan(passages=(2, 3)))
    both = Plan(rows=rows, combine=lambda scores: (scores.log_probs[1], SECOND), independent_passages=True)
    found = Session(loaded, layout, both)
    assert [batch.n_rows for batch in found.batches] == [2]
    alone = Session(loaded, layout.select((2, 3)), Plan(independent_passages=True))
    for session in (found, alone):
        session.attribute_tokens()
        for token in (9, 11):
            session.next_log_probs()
            session.advance(token)
    for shares, expected in zip(found.token_shares(), alone.token_shares(), strict=True):
        assert shares == pytest.approx((0.0, 0.0, *expected), abs=1e-6)


def test_rows_of_one_passage_need_no_attention(engine, monkeypatch):
    """Their shares are the weights that the plan gives the rows: nothing is looked at."""
    monkeypatch.setattr(Observer, "observes", lambda self, layer: self.layers is None)
    with_weights = engine.generate(request("context_experts")).sources
    assert any(source.shares != with_weights[0].shares for source in with_weights)
    monkeypatch.setattr(question_scores, "Observer", None)
    assert engine.generate(request("context_experts")).sources == with_weights


def test_answers_written_together_are_traced_as_alone(engine):
    asked = [request(name) for name in ("none", "parallel_windows", "context_experts")]
    asked.append(request("none", attribution=False))
    together = generate_together(engine, asked)
    for one, other in zip(together, [engine.generate(each) for each in asked], strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.sources) == len(other.sources)
        for here, there in zip(one.sources, other.sources, strict=True):
            assert (here.end, here.shares) == (there.end, pytest.approx(there.shares, abs=1e-5))


def test_a_prompt_without_passages_has_nothing_to_tell(engine):
    assert engine.generate(request("none", layout=toy_layout(lengths=()))).sources == ()


def test_a_model_whose_layers_forget_tells_only_what_needs_no_attention():
    forgetful = loaded_model("mistral", sliding_window=16)
    engine = Engine(forgetful, NumberEncoder(), "tiny", "print")
    assert not forgetful.keeps_all_keys
    assert engine.generate(request("none")).sources == ()
    assert len(engine.generate(request("context_experts")).sources) == TOKENS


@pytest.mark.parametrize(
    ("n_layers", "expected"),
    [(30, {15, 18, 22, 26}), (32, {16, 20, 24, 28}), (3, {1, 2}), (1, {0}), (8, {4, 5, 6, 7})],
)
def test_four_layers_of_the_upper_half_are_watched(n_layers, expected):
    assert attribution_layers(n_layers) == expected


# Short answers that rows write alone: against the stock model reading each row alone.


THREE = toy_layout((7, 4, 9))
SEEN = ((0,), (1,), (2,), ())


def average(scores):
    weights = (
        torch.full((len(scores.log_probs),), 1 / len(scores.log_probs)) if scores.weights is None else scores.weights
    )
    return (scores.log_probs + weights.log()[:, None]).logsumexp(dim=0), weights


def plan(choose=None, max_tokens=4, independent=True):
    rows = tuple(RowPlan(passages=passages) for passages in SEEN)
    candidates = None if choose is None else Draft(max_tokens, choose)
    return Plan(rows=rows, combine=average, independent_passages=independent, draft=candidates)


@torch.inference_mode()
def candidates_of(loaded, text=None, max_tokens=4, independent=True):
    groups = prefill(loaded, THREE, plan(independent=independent))
    log_probs = torch.cat([group.logits.float() for group in groups]).log_softmax(dim=-1)
    rows = [group.batch for group in groups]
    return write_candidates(rows, log_probs, torch.zeros(len(SEEN)), max_tokens, text or AnswerText())


@pytest.fixture(scope="module")
def stock():
    """Greedy answers of the stock model that reads each row alone, and what each row says of each of them."""
    model = stock_model()
    prompts = [list(THREE.select(passages).token_ids) for passages in SEEN]
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(4):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            answers.append(tuple(ids[len(prompt) :]))
        said = torch.zeros(4, 4)
        for d, answer in enumerate(answers):
            for k, prompt in enumerate(prompts):
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
                said[d, k] = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer)[:, None]).sum()
    return answers, said


@pytest.mark.parametrize("independent", [True, False])
def test_every_row_writes_what_the_model_writes_after_that_row_alone(loaded, stock, independent):
    answers, said = stock
    found = candidates_of(loaded, independent=independent)
    assert found.tokens == tuple(answers)
    assert len(set(found.tokens)) > 1, "the rows must not all agree, or the test sees little"
    assert torch.allclose(found.log_probs, said, atol=1e-4)


def test_a_candidate_of_one_token_takes_no_pass_of_the_model(loaded, stock):
    with CountedForwards(Engine(loaded, NumberEncoder(), "tiny", "print")) as forwards:
        found = candidates_of(loaded, max_tokens=1)
        of_prompt = len(forwards.shapes)
        candidates_of(loaded, max_tokens=2)
    assert found.tokens == tuple(answer[:1] for answer in stock[0])
    # Two tokens: one step of all rows, and one pass of all rows over each distinct answer.
    one_pass = [shape for shape in forwards.shapes[of_prompt:] if shape[1] == 1]
    assert forwards.shapes[:of_prompt] == [shape for shape in forwards.shapes[of_prompt:] if shape[1] != 1]
    assert len(one_pass) == 1 + len({answer[:2] for answer in stock[0]})


def test_an_end_token_ends_a_candidate_and_is_no_part_of_it(loaded, stock):
    first = stock[0][0]
    found = candidates_of(loaded, AnswerText(eos_ids=frozenset({first[2]})))
    assert found.tokens[0] == first[: first.index(first[2])]
    for answer, whole in zip(found.tokens, stock[0], strict=True):
        cut = whole.index(first[2]) if first[2] in whole else 4
        assert answer == whole[:cut], "other rows go on"


def test_an_empty_candidate_has_probability_1(loaded, stock):
    found = candidates_of(loaded, AnswerText(eos_ids=frozenset({stock[0][1][0]})))
    assert found.tokens[1] == ()
    assert found.log_probs[1].tolist() == [0.0] * 4


def test_a_line_break_after_visible_text_ends_a_candidate(loaded, stock):
    # Token n reads "n "; the first and the third token of row 0 read as line breaks.
    first = stock[0][0]
    assert first[1] not in (first[0], first[2])
    text = AnswerText(decode=lambda ids: "".join("\n" if i in (first[0], first[2]) else f"{i} " for i in ids))
    assert candidates_of(loaded, text).tokens[0] == first[:3]


def test_candidates_are_the_same_if_their_words_are(loaded):
    by_token = candidates_of(loaded)
    assert by_token.same.tolist() == [[a == b for b in by_token.tokens] for a in by_token.tokens]
    words = {0: "Paris", 1: " paris.", 2: "Lyon", 3: "PARIS\n"}
    place = {answer: words[row] for row, answer in enumerate(by_token.tokens)}
    found = candidates_of(loaded, AnswerText(decode=lambda ids: place.get(tuple(ids), "x")))
    assert found.same[0].tolist() == [True, True, False, True]


def test_writing_candidates_leaves_the_rows_where_they_were(loaded):
    seen = []

    def choose(answers):
        seen.append(answers)
        return torch.full((4,), 0.25)

    weighed, plain = Session(loaded, THREE, plan(choose)), Session(loaded, THREE, plan())
    assert len(seen) == 1
    for token in (5, 9, 11):
        assert torch.equal(weighed.next_log_probs(), plain.next_log_probs())
        weighed.advance(token)
        plain.advance(token)
    assert len(seen) == 1, "the choice is made once"


def test_a_candidate_without_use_or_without_tokens_is_refused():
    with pytest.raises(PlanConflictError, match="a draft and no combine"):
        Plan(draft=Draft(4, lambda answers: torch.ones(1)))
    with pytest.raises(PlanConflictError, match="max_tokens=0"):
        Draft(0, lambda answers: torch.ones(1))


def test_rows_that_no_answer_speaks_for_are_not_read_any_further(loaded):
    # Weights on rows 1 and 3 of 4: the session goes on with two rows, and says what those two would say.
    chosen = torch.tensor([0.0, 0.25, 0.0, 0.75])
    ours = Session(loaded, THREE, plan(lambda answers: chosen))
    alone = [Session(loaded, THREE, Plan(rows=(RowPlan(passages=SEEN[row]),))) for row in (1, 3)]
    for token in (5, 9, 11):
        assert sum(group.n_rows for group in ours.batches) == 2
        expected = (torch.stack([one.next_log_probs() for one in alone]) + chosen[[1, 3]].log()[:, None]).logsumexp(0)
        assert torch.allclose(ours.next_log_probs(), expected, atol=1e-5)
        for one in (ours, *alone):
            one.advance(token)
