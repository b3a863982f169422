"""Orders with parameters through a pipeline: what cache_aware reuses, and what it leaves alone."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.pipeline.pipeline import Defaults, Pipeline, Question
from tests.support.tiny import loaded_model
from tests.support.toy_encoder import ToyEncoder

TEXTS = {"rome": "Rome lies on the Tiber.", "paris": "Paris lies on the Seine.", "bread": "Bread is baked."}
FIRST = {"rome": 0.9, "paris": 0.8, "bread": 0.3}
SECOND = {"paris": 0.9, "rome": 0.8, "bread": 0.3}  # the next question finds Paris a little better


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2, max_position_embeddings=2048)


def made(loaded, mitigation="none"):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print", passages=PassageStore([MemoryTier()]))
    defaults = Defaults(MitigationChoice(mitigation), sampling=Sampling(max_tokens=4))
    return Pipeline(engine, Assembler(engine.encoder, engine.context_window), defaults=defaults)


def ask(pipeline, scores, order, **options):
    documents = [
        Document(page_content=TEXTS[name], id=name, metadata={"relevance_score": score})
        for name, score in scores.items()
    ]
    return pipeline.ask(Question("Which river?", documents, order=order, **options))


def ids(answer):
    return [document.id for document in answer.documents]


def test_a_prompt_that_begins_as_a_recent_one_is_read_from_there_on(loaded):
    by_relevance, aware = made(loaded), made(loaded)
    for pipeline, order in ((by_relevance, "relevance"), (aware, "cache_aware:bound=0.5")):
        ask(pipeline, FIRST, order)
    best_first = ask(by_relevance, SECOND, "relevance")
    kept = ask(aware, SECOND, "cache_aware:bound=0.5")
    assert (ids(best_first), ids(kept)) == (["paris", "rome", "bread"], ["rome", "paris", "bread"])
    passages = sum(len(text) for text in TEXTS.values())
    assert kept.usage.cached_tokens - best_first.usage.cached_tokens >= passages
    assert (kept.order, best_first.order) == ("cache_aware", "relevance")


def test_a_loss_above_the_bound_is_not_taken(loaded):
    pipeline = made(loaded)
    ask(pipeline, FIRST, "cache_aware")
    # Two of three places changed: 2 of floor(9 / 2) = 4, above 0.25.
    assert ids(ask(pipeline, SECOND, "cache_aware")) == ["paris", "rome", "bread"]


def test_the_same_question_again_stays_as_it_was(loaded):
    pipeline = made(loaded)
    for scores in (FIRST, SECOND, FIRST, SECOND):
        first = ids(ask(pipeline, scores, "cache_aware"))
        assert ids(ask(pipeline, scores, "cache_aware")) == first == list(scores)


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"mitigation": MitigationChoice("layer_scaling")}])
def test_prompts_of_another_tenant_or_method_do_not_count(loaded, other):
    pipeline = made(loaded)
    ask(pipeline, FIRST, "cache_aware:bound=0.5", **other)
    assert ids(ask(pipeline, SECOND, "cache_aware:bound=0.5")) == ["paris", "rome", "bread"]


def test_a_document_that_is_forgotten_is_no_beginning_any_more(loaded):
    pipeline = made(loaded)
    ask(pipeline, FIRST, "cache_aware:bound=0.5")
    pipeline.invalidate([Document(page_content=TEXTS["rome"], id="rome")])
    assert ids(ask(pipeline, SECOND, "cache_aware:bound=0.5")) == ["paris", "rome", "bread"]


@pytest.mark.parametrize("mitigation", ["parallel_windows", "set_prompting", "context_experts"])
def test_answers_of_order_free_methods_do_not_change(loaded, mitigation):
    plain, aware = made(loaded, mitigation), made(loaded, mitigation)
    for scores in (FIRST, SECOND, {"bread": 0.9, "rome": 0.2}):
        one, other = ask(plain, scores, "relevance"), ask(aware, scores, "cache_aware")
        assert one.text == other.text
        assert {d.id: d.attention for d in one.documents} == pytest.approx(
            {d.id: d.attention for d in other.documents}
        )


def test_a_wrong_parameter_of_an_order_is_told_before_anything_is_read(loaded):
    with pytest.raises(ConfigError, match="bound=2 must be a number between 0 and 1"):
        ask(made(loaded), FIRST, "cache_aware:bound=2")
