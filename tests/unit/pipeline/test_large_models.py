"""What a large model gets where no method is named: the three passages that it judges best, read together."""

from __future__ import annotations

import itertools
from contextlib import closing

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.pipeline import build as module
from rag_posfix.pipeline.build import build_pipeline
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.settings import Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tiny import save_tiny

DOCUMENTS = [Document(page_content=text, id=text) for text in ("Rome", "Paris", "Bread", "Water")]


@pytest.fixture(params=[False, True], ids=["loaded", "deferred"])
def build(request, tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model", max_position_embeddings=2048)
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())

    def built(channels, **changes):
        monkeypatch.setattr(module, "LARGE_HIDDEN_SIZE", channels)
        settings = Settings(model=str(folder), cache_dir=tmp_path / "cache", dtype="float32", max_tokens=4, **changes)
        return build_pipeline(settings, deferred=request.param)

    return built


def asked(pipeline, documents=DOCUMENTS, **changes):
    answer = pipeline.ask(Question("Which one?", documents=documents, use_cache=False, **changes))
    assert not answer.warnings
    return answer


@pytest.mark.slow
def test_the_best_three_are_read_in_an_order_that_the_given_order_does_not_change(build):
    with closing(build(1)) as pipeline:
        first = asked(pipeline)
        assert len(first.documents) == 3
        scores = [document.score for document in first.documents]
        assert scores == sorted(scores), "the best is last, next to the question"
        for order in itertools.permutations(DOCUMENTS):
            answer = asked(pipeline, order)
            assert (answer.text, answer.documents) == (first.text, first.documents)
        judged = asked(pipeline, reranker="yes_no")
        assert {document.text for document in first.documents} == {
            document.text for document in sorted(judged.documents, key=lambda document: document.score)[1:]
        }


def test_of_a_list_all_that_the_judge_says_yes_to_are_read_and_the_others_are_named(build, monkeypatch):
    monkeypatch.setattr("rag_posfix.pipeline.defaults.ALL_FROM", 0.0)
    question = Question("List all rivers.", documents=DOCUMENTS, use_cache=False)
    with closing(build(1)) as pipeline:
        assert len(pipeline.ask(question).documents) == len(DOCUMENTS)
        answer = asked(pipeline)
        (left_out,) = {document.id for document in DOCUMENTS} - {document.id for document in answer.documents}
        assert answer.dropped == ((left_out, "reranker"),)
    monkeypatch.setattr("rag_posfix.pipeline.defaults.ALL_FROM", 1.0)
    with closing(build(1)) as pipeline:
        assert len(pipeline.ask(question).documents) == 3, "never fewer than the best three"


def test_a_smaller_model_and_what_is_named_stay(build):
    with closing(build(10**6)) as pipeline:
        assert len(asked(pipeline).documents) == len(DOCUMENTS)
    for changes in ({"reranker": "embedding"}, {"order": "relevance"}, {"mitigation": "default"}):
        with closing(build(1, **changes)) as pipeline:
            assert len(asked(pipeline).documents) == len(DOCUMENTS)
    with closing(build(1)) as pipeline:
        assert len(asked(pipeline, mitigation=MitigationChoice("context_experts")).documents) == len(DOCUMENTS)
        assert len(asked(pipeline, mitigation=MitigationChoice("auto")).documents) == 3


@pytest.mark.parametrize(("channels", "is_small"), [(1, True), (10**6, False)])
def test_small_readers_are_models_with_some_channels_and_toys_are_not(build, monkeypatch, channels, is_small):
    monkeypatch.setattr("rag_posfix.pipeline.build.SMALL_HIDDEN_SIZE", channels)
    with closing(build(10**6)) as pipeline:
        assert pipeline.defaults.is_small_reader is is_small


def test_support_needs_no_pass_of_its_own_where_the_judge_chose_the_passages(build, monkeypatch):
    monkeypatch.setattr(module, "JUDGING_HIDDEN_SIZE", 1)
    question = Question("Which one?", documents=DOCUMENTS, use_cache=False, allow_unsupported=True)
    with closing(build(1)) as pipeline:
        assert "support" not in pipeline.ask(question).timings
    with closing(build(1, mitigation="default", reranker="embedding")) as pipeline:
        assert "support" in pipeline.ask(question).timings


def test_a_model_with_fewer_channels_is_not_asked_about_support(build, monkeypatch):
    monkeypatch.setattr(module, "JUDGING_HIDDEN_SIZE", 10**6)
    with closing(build(1, mitigation="default", reranker="embedding")) as pipeline:
        answer = pipeline.ask(Question("Which one?", documents=DOCUMENTS, use_cache=False))
    assert "support" not in answer.timings
    assert answer.support in ("unknown", "no")
    assert answer.grounded


@pytest.mark.parametrize(
    ("middle", "large", "least"),
    [(1, 10_000, 1.2), (1, 1, 0.8), (10_000, 20_000, 0.8)],
    ids=["middle", "large", "small"],
)
def test_a_passage_must_gain_more_with_a_model_between_small_and_large(build, monkeypatch, middle, large, least):
    monkeypatch.setattr(module, "MIDDLE_HIDDEN_SIZE", middle)
    with closing(build(large)) as pipeline:
        assert pipeline.relevance.least_gain == least
