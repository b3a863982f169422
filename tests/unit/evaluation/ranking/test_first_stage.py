"""The first stage; retrievers over vectors and word statistics find what retrievers over documents find."""

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import (
    FirstStage,
    candidates_of,
    count_words,
    documents_with_text,
    embed_batch,
    open_vectors,
    retrieve,
    retriever_of,
    run_as_first_stage,
    searched_texts,
    stored_ids,
    vectors_retriever,
    words_retriever,
)
from rag_posfix.evaluation.ranking.rankings import RankedTopics, Ranking, RankJournal
from rag_posfix.evaluation.record import silent
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from tests.support.letter_embeddings import LetterEmbeddings


class TestFirstStage:
    topics = (Topic("1", "first", {"a": 1}), Topic("2", "second", {"b": 1}))
    collection = Collection(
        {name: Document(id=name, page_content=name * 3, metadata={"title": name}) for name in "abc"}, "digest", {}
    )

    def stage(self, identity="stage"):
        asked = []

        def rank_all(topics, depth):
            for index, topic in enumerate(topics):
                asked.append((topic.id, depth))
                yield index, Ranking(("b", "a")[:depth], (0.75, 0.5)[:depth], 0.5)

        return FirstStage("toy", identity, rank_all), asked

    def test_each_topic_is_asked_once_and_another_depth_or_stage_asks_again(self, tmp_path):
        path = tmp_path / "journal.jsonl"
        stage, asked = self.stage()
        for depth in (2, 2, 1):
            retrieve(stage, self.topics, depth, RankJournal(path))
        assert asked == [("1", 2), ("2", 2), ("1", 1), ("2", 1)]
        other, asked = self.stage("another")
        assert retrieve(other, self.topics, 2, RankJournal(path)).reused == frozenset()
        assert len(asked) == 2

    def test_candidates_are_copies_in_order_with_the_scores_of_the_first_stage(self):
        found = candidates_of(self.topics, retrieve(self.stage()[0], self.topics, 2, RankJournal()), self.collection)
        assert [(d.id, d.page_content, d.metadata) for d in found[0].documents] == [
            ("b", "bbb", {"title": "b", "relevance_score": 0.75}),
            ("a", "aaa", {"title": "a", "relevance_score": 0.5}),
        ]
        assert self.collection.documents["b"].metadata == {"title": "b"}

    def test_a_run_is_a_first_stage_with_as_many_documents_as_are_asked_for(self, tmp_path):
        path = tmp_path / "bm25.trec"
        path.write_text("1 Q0 a 1 12.5 t\n1 Q0 c 2 25 t\n1 Q0 b 3 0 t\n9 Q0 z 1 1 t\n")
        stage, names = run_as_first_stage(path)
        assert names == {"a", "b", "c", "z"}
        found = retrieve(stage, self.topics, 2, RankJournal(tmp_path / "journal.jsonl"))
        assert (found.rankings["1"].ids, found.rankings["1"].scores) == (("c", "a"), (25.0, 12.5))
        assert found.rankings["2"].ids == ()
        assert not (tmp_path / "journal.jsonl").exists()
        documents = candidates_of(self.topics, found, self.collection)[0].documents
        assert [d.metadata["relevance_score"] for d in documents] == [1.0, 0.5]

    def test_a_run_that_names_a_document_that_the_corpus_lacks_is_refused(self):
        found = RankedTopics("first_stage", {"1": Ranking(("z",), (1.0,), 0.0)}, frozenset())
        with pytest.raises(EvaluationError, match="ranks document 'z' for query '1', but the corpus has no such"):
            candidates_of(self.topics[:1], found, self.collection)


WORDS = ("bread", "bridge", "river", "rye", "lamp")
DOCUMENTS = [
    Document(id=f"d{n}", page_content=f"{WORDS[n % 5]} {WORDS[n // 5 % 5]}", metadata={"title": WORDS[n % 2]})
    for n in range(60)
]  # more than twice each text: scores tie
NAMES = stored_ids(DOCUMENTS)
QUESTIONS = ("which bread", "a bridge over the river", "rye", "river lamp bread")


def found(retriever, k=7):
    return [[(d.id, d.metadata["relevance_score"]) for d in retriever.retrieve(question, k)] for question in QUESTIONS]


def opened(embeddings, backwards=False):
    def embed(batches):
        numbered = list(enumerate(batches))
        for index, texts in reversed(numbered) if backwards else numbered:
            yield index, embed_batch(embeddings, texts)

    return open_vectors(DOCUMENTS, embeddings, "digest", embed, None, silent)


def over_vectors(**options):
    model = LetterEmbeddings()
    return vectors_retriever(NAMES, opened(model, **options).vectors_of(NAMES), model)


def over_words(parameters):
    return words_retriever(NAMES, count_words(searched_texts(DOCUMENTS), parameters))


@pytest.fixture
def store():
    made = FaissVectorStore(LetterEmbeddings(), kind="flat")
    made.add_documents(DOCUMENTS)
    return made


@pytest.mark.parametrize("parameters", [{}, {"k1": 2.0, "b": 0.0}])
def test_word_statistics_rank_as_the_documents_do(parameters):
    assert found(over_words(parameters)) == found(BM25Retriever.from_documents(DOCUMENTS, **parameters))


def test_vectors_rank_as_the_documents_do_in_whatever_order_they_come(store, monkeypatch):
    monkeypatch.setattr("rag_posfix.evaluation.ranking.first_stage.DOCUMENTS_PER_BATCH", 7)
    expected = found(PassageRetriever(store=store))
    assert found(over_vectors()) == expected
    assert found(over_vectors(backwards=True)) == expected


def test_both_are_fused_as_over_documents(store):
    expected = HybridRetriever(
        retrievers=[PassageRetriever(store=store), BM25Retriever.from_documents(DOCUMENTS, k1=1.5)], fusion="score"
    )
    made = retriever_of([over_vectors(), over_words({"k1": 1.5})], {"fusion": "score", "k1": 1.5, "weights": None})
    assert found(made) == found(expected)


def test_documents_without_text_are_not_searched():
    blank = Document(id="blank", page_content=" \n")
    assert documents_with_text(Collection({"d0": DOCUMENTS[0], "blank": blank}, "", {})) == [DOCUMENTS[0]]
    with pytest.raises(EvaluationError, match="no document of the corpus has text"):
        documents_with_text(Collection({"blank": blank}, "", {}))
