"""`yes_no` with a model of its own: loaded by the first question, checked before."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.generation.load import load_engine
from rag_posfix.pipeline import build as module
from rag_posfix.pipeline.build import build_pipeline, build_reranker_models
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.pipeline.query import search_query
from rag_posfix.reranking import YesNoReranker
from rag_posfix.reranking.base import sigmoid
from rag_posfix.reranking.build import RerankerModels, build_reranker, parse_reranker
from rag_posfix.settings import PassageStoreSettings, RemoteSettings, Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tiny import save_tiny
from tests.support.toy_encoder import ToyEncoder
from tests.support.upstream import as_json, first_passage, judging, upstream

HISTORY = [
    {"role": "user", "content": "Who built the mill?"},
    {"role": "assistant", "content": "Ada."},
]
DOCUMENTS = [Document(page_content=text, id=text) for text in ("Rome", "Paris", "Bread")]


@pytest.fixture
def judge(tmp_path):
    return save_tiny(tmp_path / "judge", max_position_embeddings=2048)


@pytest.fixture
def build(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())

    def built(reranker, generator=None, **changes):
        settings = Settings(reranker=reranker, cache_dir=tmp_path / "cache", dtype="float32", **changes)
        return build_pipeline(settings, generator=generator or FakeGenerator(ToyEncoder()))

    return built


def judged(pipeline):
    answer = pipeline.ask(Question("Which one?", documents=DOCUMENTS, use_cache=False))
    assert not answer.warnings
    return {document.text: document.score for document in answer.documents}


def scores(reranker):
    ranked = reranker.compress_documents(DOCUMENTS, "Which one?")
    return {document.page_content: document.metadata["relevance_score"] for document in ranked}


def test_the_model_is_loaded_by_the_first_question_and_once(build, judge, monkeypatch):
    engines = []
    monkeypatch.setattr(
        module, "load_engine", lambda *given, **more: engines.append(load_engine(*given, **more)) or engines[0]
    )
    with closing(build(f"yes_no:model={judge}")) as pipeline:
        assert engines == []
        first, again = judged(pipeline), judged(pipeline)
    (engine,) = engines
    assert first == again == pytest.approx(scores(YesNoReranker(generator=engine)))
    assert len(set(first.values())) == 3
    assert engine.passages is None, "the store is the pipeline's"


def test_a_second_question_reads_the_judges_passages_from_its_store_with_the_same_bits(build, judge):
    with closing(build(f"yes_no:model={judge}")) as pipeline:
        cold = judged(pipeline)
        before = pipeline.passages.stats()["hits"]
        assert judged(pipeline) == cold
        assert pipeline.passages.stats()["hits"] - before == len(DOCUMENTS) + 1, "the passages and what precedes them"


def test_a_removed_document_is_dropped_from_the_judges_store(build, judge):
    with closing(build(f"yes_no:model={judge}")) as pipeline:
        judged(pipeline)
        pipeline.invalidate(DOCUMENTS[:1])
        before = pipeline.passages.stats()["misses"]
        judged(pipeline)
        assert pipeline.passages.stats()["misses"] - before == 1


def test_the_judge_shares_the_store_of_the_served_model_and_not_its_entries(build, judge, tmp_path):
    with closing(build(f"yes_no:model={judge}")) as pipeline:
        alone = judged(pipeline)
    served = load_engine(str(save_tiny(tmp_path / "served", "qwen2", max_position_embeddings=2048)), dtype="float32")
    with closing(build(f"yes_no:model={judge}", served, mitigation="none")) as pipeline:
        assert judged(pipeline) == judged(pipeline) == alone


@pytest.mark.parametrize("served", [True, False])
def test_without_a_store_in_the_settings_the_judge_has_none(build, judge, served):
    generator = load_engine(str(judge), dtype="float32") if served else None
    settings = PassageStoreSettings(enabled=False)
    with closing(build(f"yes_no:model={judge}", generator, passages=settings)) as pipeline:
        assert pipeline.passages is None
        judged(pipeline)


def test_a_fusion_and_an_experiment_load_it_by_its_name(judge, tmp_path):
    models = build_reranker_models(Settings(cache_dir=tmp_path, dtype="float32", model="not loaded"))
    own = build_reranker(MethodSpec("yes_no", {"model": str(judge)}), models)
    parts = replace(models, embeddings=LetterEmbeddings, generator=lambda: FakeGenerator(ToyEncoder()))
    fused = build_reranker(parse_reranker(f'fused:scorers=["yes_no:model={judge}","embedding"]'), parts)
    ranked = fused.compress_documents(DOCUMENTS, "Which one?")
    raw = {document.page_content: document.metadata["reranking"]["scores"]["yes_no"] for document in ranked}
    assert {text: sigmoid(value) for text, value in raw.items()} == pytest.approx(scores(own))
    assert own.generator is models.load_model(str(judge))


def test_a_model_that_is_not_there_is_refused_before_a_question(build, judge):
    with pytest.raises(ConfigError, match="/nowhere"):
        build("yes_no:model=/nowhere")
    with pytest.raises(ConfigError, match="model"):
        parse_reranker('yes_no:model=""')
    with pytest.raises(ConfigError, match="nothing loads model='some'"):
        build_reranker(MethodSpec("yes_no", {"model": "some"}), RerankerModels(LetterEmbeddings, pytest.fail))


@pytest.mark.parametrize(("served", "key"), [("other", None), ("own", "Bearer sk-1"), ("here", "Bearer sk-1")])
def test_a_server_judges_and_gets_the_key_unless_the_served_model_is_on_another(build, served, key):
    odds = {"Rome": -2.0, "Paris": 1.0, "Bread": -1.0}

    def judge(body):
        content = body["messages"][-1]["content"]
        return as_json(
            judging("Yes", {"Yes": next((v for k, v in odds.items() if k in content), 0.0) - 5, "No": -5.0})
        )

    with upstream(judge) as own, upstream(first_passage) as other:
        model = {"other": other.model, "own": own.model, "here": "smollm2"}[served]
        settings = {"model": model, "mitigation": "none", "remote": RemoteSettings(api_key="sk-1")}
        with closing(build(f'yes_no:model="{own.model}"', **settings)) as pipeline:
            assert judged(pipeline) == pytest.approx({text: sigmoid(value) for text, value in odds.items()})
            assert len(own.headers) == 5, "three passages, none, and one that finds the form"
            assert judged(pipeline) == judged(pipeline)
        assert {headers.get("authorization") for headers in own.headers} == {key}
        assert len(own.headers) == 5, "judgements are kept in the answer cache"


@pytest.mark.parametrize("own", [True, False])
def test_a_writer_on_another_server_does_not_get_the_key(build, own):
    with upstream(first_passage) as served, upstream(lambda _: as_json(judging("Who built it?", {}))) as other:
        settings = {"model": served.model, "mitigation": "none", "remote": RemoteSettings(api_key="sk-1")}
        writer = served if own else other
        with closing(build("embedding", writer=writer.model, device_map="auto", **settings)) as pipeline:
            search_query("rewrite", "And who?", HISTORY, pipeline.writer)
        assert {headers.get("authorization") for headers in writer.headers} == {"Bearer sk-1" if own else None}
