"""A pipeline as it is put together: what is deleted from its index is forgotten everywhere."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.generation.batching.scheduler import unbatched
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline import build as module
from rag_posfix.pipeline.build import (
    build_embeddings,
    build_engine,
    build_pipeline,
    build_reranker_models,
    invalidate_stored,
)
from rag_posfix.pipeline.pipeline import Question
from rag_posfix.reranking import EmbeddingReranker, LikelihoodReranker
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.settings import CacheSettings, PassageStoreSettings, Settings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.tiny import loaded_model, save_tiny
from tests.support.toy_encoder import ToyEncoder

DOCUMENTS = [
    Document(id="rome", page_content="Rome lies on the Tiber.", metadata={"title": "Rome", "relevance_score": "high"}),
    Document(id="paris", page_content="Paris lies on the Seine, and is larger."),
    Document(id="bread", page_content="Bread is baked in ovens."),
]


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=2)


@pytest.fixture
def build(loaded, tmp_path, monkeypatch):
    """Builds a pipeline on an index of three documents; its caches are in memory and on disk."""
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    index = FaissVectorStore(LetterEmbeddings())
    index.add_documents(DOCUMENTS)
    index.save(tmp_path / "index")

    def built(**changes):
        engine = Engine(loaded, ToyEncoder(), "tiny", "print")
        return build_pipeline(settings_in(tmp_path, **changes), index=tmp_path / "index", generator=engine)

    return built


def settings_in(folder, **changes):
    passages = PassageStoreSettings(disk_bytes=10_000_000)
    return Settings(cache_dir=folder / "cache", keep_on_disk=True, max_tokens=2, passages=passages, **changes)


@pytest.fixture
def pipeline(build):
    with closing(build()) as built:
        yield built


def ask(pipeline, names, *, use_cache=True):
    """Ask about documents as the index has them, whether it still has them or not."""
    documents = [
        Document(id=one.id, page_content=one.page_content, metadata={"title": one.metadata.get("title")})
        for one in DOCUMENTS
        if one.id in names
    ]
    return pipeline.ask(Question("Which river?", documents, use_cache=use_cache))


def built_with(loaded, tmp_path, monkeypatch, generator=None, **settings):
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    engine = generator or Engine(loaded, ToyEncoder(), "tiny", "print")
    return build_pipeline(Settings(cache_dir=tmp_path / "cache", **settings), generator=engine)


def test_documents_without_a_score_are_scored_by_their_embeddings(pipeline):
    assert isinstance(pipeline.reranker.reranker, EmbeddingReranker)
    assert (pipeline.reranker.deadline_seconds, pipeline.candidates) == (120.0, 0)
    assert pipeline.embeddings is pipeline.reranker.reranker.embeddings
    assert pipeline.with_generator(pipeline.generator).embeddings is pipeline.embeddings


def test_a_reranker_is_named_with_its_parameters_and_shares_model_and_passages(loaded, tmp_path, monkeypatch):
    named = {"reranker": "likelihood:batch_size=2", "reranker_deadline_seconds": 60, "candidates": 7, "max_tokens": 2}
    with closing(built_with(loaded, tmp_path, monkeypatch, **named)) as pipeline:
        inner = pipeline.reranker.reranker
        assert isinstance(inner, LikelihoodReranker)
        assert (inner.batch_size, pipeline.reranker.deadline_seconds, pipeline.candidates) == (2, 60, 7)
        assert inner.generator is unbatched(pipeline.generator)
        answer = pipeline.ask(Question("Which river?", DOCUMENTS[1:], use_cache=False))
        assert all(0 < document.score < 1 for document in answer.documents)
        whole = answer.usage.prompt_tokens - len("Question: Which river?\nAnswer:") - len(".\n.assistant\n")
        assert answer.usage.cached_tokens == whole, "what the reranker read, the answer need not read"


def test_questions_with_one_reranker_share_it_and_its_time_limit(loaded, tmp_path, monkeypatch):
    with closing(built_with(loaded, tmp_path, monkeypatch, reranker_deadline_seconds=60)) as pipeline:
        first, again, other = (pipeline.choose_reranker(MethodSpec("likelihood", {"top_n": n})) for n in (2, 2, 3))
        assert again is first
        assert (other.reranker.top_n, other.deadline_seconds) == (3, 60)
        assert other.health is pipeline.reranker.health
        others = [pipeline.choose_reranker(MethodSpec("embedding", {"top_n": n})) for n in range(1, 70)]
        assert [chosen.reranker.top_n for chosen in others] == list(range(1, 70))
        assert pipeline.choose_reranker(MethodSpec("likelihood", {"top_n": 2})) is not first, "they are bounded"


def test_a_reranker_that_the_generator_cannot_serve_closes_what_was_loaded(tmp_path, monkeypatch):
    closed = []
    split = FakeGenerator(ToyEncoder())
    split.close = lambda: closed.append(True)
    monkeypatch.setattr(module, "load_parallel", lambda *_arguments, **_options: split)
    with pytest.raises(ConfigError, match="FakeGenerator cannot read passages"):
        build_pipeline(Settings(reranker="in_context", cache_dir=tmp_path, tp=2))
    assert closed == [True]


@pytest.mark.slow
def test_a_model_that_differs_in_its_last_byte_answers_for_itself(tmp_path, monkeypatch):
    """Its first MiB is that of the other: only a digest of the whole file tells them apart."""
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    model = save_tiny(tmp_path / "model", num_hidden_layers=12)

    def ask_the_model():
        settings = Settings(
            model=str(model), dtype="float32", cache_dir=tmp_path / "cache", keep_on_disk=True, max_tokens=2
        )
        with closing(build_pipeline(settings)) as pipeline:
            return ask(pipeline, ["rome"])

    assert [ask_the_model().cached for _ in range(2)] == [False, True]
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        (last,) = weights.read(1)
        assert weights.tell() > 1 << 20
        weights.seek(-1, os.SEEK_END)
        weights.write(bytes([last ^ 0x80]))  # the sign of the last tensor's last value
    assert [ask_the_model().cached for _ in range(2)] == [False, True]


def found(pipeline, names):
    """How many tokens of a question about these documents need not be read."""
    assert pipeline.passages.flush()
    return ask(pipeline, names, use_cache=False).usage.cached_tokens


def test_the_second_question_reads_nothing_that_the_first_has_read(pipeline):
    first = pipeline.ask("Which bread?")
    assert sorted(document.id for document in first.documents) == ["bread", "paris", "rome"]
    assert (first.cached, first.usage.cached_tokens) == (False, 0)
    second = pipeline.ask("Which river?")
    suffix = len("Question: Which river?\nAnswer:") + len(".\n.assistant\n")  # the dots are control tokens
    assert second.usage.cached_tokens == second.usage.prompt_tokens - suffix
    assert ask(pipeline, ["rome", "paris", "bread"]).cached is True


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_is_gone_from_the_index_is_gone_from_both_caches(pipeline, how):
    store = pipeline.retriever.retrievers[0].store
    for names in (["paris", "bread"], ["rome", "bread"], ["bread"]):
        assert ask(pipeline, names).cached is False
    everything = found(pipeline, ["rome", "paris", "bread"])
    kept = found(pipeline, ["paris", "bread"])
    rome = len("Rome\nRome lies on the Tiber.\n\n")
    assert everything == kept + rome
    if how == "deleted":
        store.delete(["rome", "nobody has this"])
    else:
        store.add_documents([Document(id="rome", page_content="Rome lies on seven hills.")])
    held = [tier["entries"] for tier in pipeline.passages.stats()["tiers"]]
    assert held == [3, 3], "the prefix and the other two, in memory and on disk"
    assert ask(pipeline, ["paris", "bread"]).cached is True
    assert ask(pipeline, ["bread"]).cached is True
    assert ask(pipeline, ["rome", "bread"]).cached is False
    assert found(pipeline, ["paris", "bread"]) == kept


def test_a_model_that_is_loaded_later_forgets_what_is_deleted_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: LetterEmbeddings())
    model = save_tiny(tmp_path / "model", num_hidden_layers=1)
    settings = settings_in(tmp_path, model=str(model), dtype="float32", mitigation="context_experts")
    with closing(build_pipeline(settings, deferred=True)) as pipeline:
        ask(pipeline, ["rome", "paris"])
        assert found(pipeline, ["rome", "paris"]) > found(pipeline, ["paris"]) > 0
    with closing(build_pipeline(settings, deferred=True)) as pipeline:
        pipeline.invalidate([DOCUMENTS[0]])  # no model is loaded yet: what an earlier process left on the disk
        assert found(pipeline, ["rome"]) == found(pipeline, ["bread"])


def test_a_document_that_was_read_cut_is_forgotten_like_any_other(pipeline):
    long = Document(id="long", page_content="secret " * 200)
    pipeline.retriever.retrievers[0].store.add_documents([long])
    assert pipeline.ask(Question("Who?", [long])).usage.prompt_tokens == pipeline.generator.context_window - 2
    assert pipeline.passages.stats()["tiers"][0]["entries"] == 2, "the prefix and the document"
    pipeline.retriever.retrievers[0].store.delete(["long"])
    assert pipeline.passages.stats()["tiers"][0]["entries"] == 1


def test_what_is_forgotten_from_outside_is_gone_for_every_process_that_starts_later(build, tmp_path):
    with closing(build()) as first:
        assert found(first, ["rome", "paris", "bread"]) == 0
        assert ask(first, ["rome"]).cached is False
        assert ask(first, ["bread"]).cached is False
        assert first.passages.flush()
    answers, passages, _ = invalidate_stored([DOCUMENTS[0]], settings_in(tmp_path))
    assert (answers, passages) == (1, 1)
    with closing(build()) as second:
        assert ask(second, ["bread"]).cached is True
        assert ask(second, ["rome"]).cached is False
    assert invalidate_stored([], settings_in(tmp_path)) == (0, 0, 0)


def test_answers_that_an_earlier_process_left_on_disk_are_dropped_with_their_documents(tmp_path, build):
    with closing(build()) as earlier:
        ask(earlier, ["rome"])
    now = settings_in(tmp_path).model_copy(update={"cache": CacheSettings(), "keep_on_disk": None})
    assert invalidate_stored([DOCUMENTS[0]], now)[0] == 1


@pytest.mark.parametrize("caches", [{"cache": CacheSettings(enabled=False)}, {"cache": CacheSettings(disk_bytes=0)}])
def test_invalidating_without_stored_entries_does_nothing(tmp_path, caches):
    settings = Settings(cache_dir=tmp_path / "cache", passages=PassageStoreSettings(enabled=False), **caches)
    assert invalidate_stored(DOCUMENTS, settings) == (0, 0, 0)
    assert not (tmp_path / "cache").exists()


def test_by_words_no_embedding_model_is_needed(build, monkeypatch):
    class Unloaded(LetterEmbeddings):
        def embed_query(self, text):
            raise AssertionError("needed after all")

    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_: Unloaded("unloaded"))
    with closing(build(retriever="bm25", min_relevance="off")) as pipeline:
        assert [document.id for document in pipeline.retriever.retrieve("seine tiber lies", 5)] == ["rome", "paris"]
        assert [document.id for document in pipeline.ask("Which ovens?").documents] == ["bread"]


def test_hybrid_fuses_both_and_what_is_deleted_is_gone_from_both(build):
    with closing(build(retriever="hybrid", k=3)) as pipeline:
        dense, words = pipeline.retriever.retrievers
        assert dense.retrieve("Which ovens?", 3)[0].id == "paris"
        assert words.retrieve("Which ovens?", 3)[0].id == "bread"
        fused = pipeline.retriever.retrieve("Which ovens?", 3)
        assert {document.id for document in fused} == {"rome", "paris", "bread"}
        assert fused[0].id == "bread"
        assert ask(pipeline, ["bread"]).cached is False
        dense.store.delete(["bread"])
        assert "bread" not in {document.id for document in pipeline.retriever.retrieve("Which ovens?", 3)}
        assert ask(pipeline, ["bread"]).cached is False


def test_by_default_words_add_passages_that_have_the_scores_of_the_embeddings(build):
    with closing(build(k=3)) as pipeline:
        dense, words = pipeline.retriever.retrievers
        assert (type(dense).__name__, type(words).__name__) == ("PassageRetriever", "BM25Retriever")
        assert pipeline.retriever.similarity_range() == dense.similarity_range()
        expected = {
            document.id: document.metadata["relevance_score"] for document in dense.retrieve("Which ovens?", 3)
        }
        found = pipeline.retriever.retrieve("Which ovens?", 3)
        assert {document.id: document.metadata["relevance_score"] for document in found} == expected


def test_the_profile_of_the_settings_is_that_of_the_order(loaded, tmp_path):
    file = tmp_path / "slots.json"
    file.write_text('{"profile": [0.1, 0.2, 0.9]}')
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    settings = Settings(order="profile", profile=file, cache_dir=tmp_path / "cache", max_tokens=2)
    with closing(build_pipeline(settings, generator=engine)) as built:
        documents = [one.model_copy(update={"metadata": {"relevance_score": 0.5}}) for one in DOCUMENTS]
        answer = built.ask(Question("Which river?", documents))
    assert [document.id for document in answer.documents] == ["bread", "paris", "rome"]
    assert answer.order == "profile"


def test_an_order_that_cannot_be_made_is_told_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="needs the measured value of each slot"):
        build_pipeline(Settings(model="/nowhere", order="profile"))


def test_the_budget_of_the_settings_is_that_of_the_prompts(loaded, tmp_path):
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    settings = Settings(passage_tokens=14, overflow="truncate", cache_dir=tmp_path / "cache", max_tokens=2)
    with closing(build_pipeline(settings, generator=engine)) as built:
        assert built.ask(Question("Which?", DOCUMENTS[1:])).usage.prompt_tokens > 0
        made = built.assembler.assemble("Which?", DOCUMENTS[1:])
    assert [len(span) for span in made.layout.passages] == [14, 14]
    with pytest.raises(ConfigError, match="say how many a passage may have"):
        build_pipeline(Settings(model="/nowhere", passage_shrink=0.5))


def test_an_engine_and_embeddings_are_those_that_the_settings_name(tmp_path, monkeypatch):
    loads = []
    monkeypatch.setattr(module, "load_engine", lambda model, **how: loads.append((model, how)))
    settings = Settings(model="m", embedding_model="e", dtype="float32", device="cpu", cache_dir=tmp_path)
    build_engine(settings)
    how = {"dtype": "float32", "device": "cpu", "device_map": None, "cache_dir": tmp_path, "adapter": None}
    assert loads == [("m", {**how, "batch_invariant": "auto"})]
    assert build_embeddings(settings).model == "e"


def test_parts_of_rerankers_are_made_when_they_are_needed_and_once(monkeypatch):
    made = []
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda model, **_: made.append(model) or LetterEmbeddings())
    monkeypatch.setattr(module, "load_engine", lambda model, **_: made.append(model) or object())
    parts = build_reranker_models(Settings(embedding_model="some", model="other"))
    assert made == []
    assert parts.embeddings() is parts.embeddings()
    assert parts.generator() is parts.generator()
    assert made == ["some", "other"]


def test_a_given_retriever_takes_the_place_of_an_index(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SentenceEmbeddings", lambda _name, **_options: LetterEmbeddings())
    settings = settings_in(tmp_path, index=tmp_path / "absent")
    engine = Engine(loaded, ToyEncoder(), "tiny", "print")
    with closing(build_pipeline(settings, retriever=lambda question: DOCUMENTS[1:], generator=engine)) as pipeline:
        answer = pipeline.ask("Which river?")
    assert sorted(document.id for document in answer.documents) == ["bread", "paris"]
    assert all(document.score is not None for document in answer.documents), "scored by their embeddings"
    with pytest.raises(ConfigError, match=r"index='x' and a retriever are given; give one of them"):
        build_pipeline(settings, index="x", retriever=lambda question: [], generator=engine)


def test_a_question_cannot_make_the_process_load_a_reranker_of_its_own(tmp_path):
    pipeline = build_pipeline(
        Settings(cache_dir=tmp_path, cache=CacheSettings(enabled=False)), generator=FakeGenerator(ToyEncoder())
    )
    documents = [Document(page_content="a bridge")]
    for spec in (
        MethodSpec("cross_encoder"),
        MethodSpec("fused", {"scorers": ["cross_encoder:top_n=1", "embedding"]}),
        MethodSpec("yes_no", {"model": "smollm2"}),
        MethodSpec("fused", {"scorers": ['yes_no:model="openai:judge@http://10.0.0.1"', "embedding"]}),
    ):
        with pytest.raises(ConfigError, match="loads a model of its own"):
            pipeline.ask(Question("Which?", documents=documents, reranker=spec))
    with pytest.raises(UnknownNameError, match="nonesuch"):
        pipeline.ask(Question("Which?", documents=documents, reranker=MethodSpec("nonesuch")))
    pipeline.close()


def test_failures_of_a_reranker_that_a_question_names_are_counted_with_those_of_the_default_one(tmp_path):
    class FailsWhereItRanks(FakeGenerator):
        def stream(self, request):  # what the reranker calls; answers use generate
            raise RuntimeError

    with closing(build_pipeline(settings_in(tmp_path), generator=FailsWhereItRanks(ToyEncoder()))) as pipeline:
        documents = [Document(page_content="a b"), Document(page_content="c d")]
        asked = Question("Which?", documents=documents, reranker=MethodSpec("listwise"))
        assert pipeline.ask(asked).warnings == (
            "reranker listwise failed (RuntimeError); the documents keep their order",
        )
        assert pipeline.reranker.health.failures()["listwise"].in_a_row == 1


def test_further_indexes_are_chosen_by_name(build, tmp_path):
    words = FaissVectorStore(LetterEmbeddings())
    words.add_documents([Document(id="oslo", page_content="Oslo lies on a fjord.")])
    words.save(tmp_path / "words")
    with closing(build(indexes={"words": tmp_path / "words"})) as pipeline:
        found = pipeline.ask(Question("Where does Oslo lie?", index="words")).documents
        assert [document.id for document in found] == ["oslo"]
        assert "oslo" not in [document.id for document in pipeline.ask("Where does Oslo lie?").documents]
        with pytest.raises(UnknownNameError, match=r"unknown index 'word'\. Available: words"):
            pipeline.ask(Question("Where?", index="word"))
