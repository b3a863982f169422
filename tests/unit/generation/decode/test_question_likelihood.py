"""How likely a passage makes the question: equal to the stock model's own log-probabilities."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.batching.scheduler import BatchingGenerator
from rag_posfix.generation.decode.question_scores import first_token_log_probs, question_likelihood
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill import per_passage
from rag_posfix.plan.layout import Span
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout
from tests.support.tiny_evaluation import CountedForwards

LAYOUT = toy_layout()


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
