"""The first stage ranks as retrievers over its documents do."""

from functools import partial

import pytest
from langchain_core.documents import Document

from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection, Topic
from rag_posfix.evaluation.ranking.first_stage import (
    FirstStage,
    candidates_of,
    open_first_stage,
    retrieve,
    run_as_first_stage,
)
from rag_posfix.evaluation.ranking.rankings import Ranking, RankJournal
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


WORDS = ("bread", "bridge", "river", "rye", "lamp")
DOCUMENTS = [
    Document(id=f"d{n}", page_content=f"{WORDS[n % 5]} {WORDS[n // 5 % 5]}", metadata={"title": WORDS[n % 2]})
    for n in range(60)
]  # more than twice each text: scores tie
TOPICS = [
    Topic(str(n), question, {})
    for n, question in enumerate(("which bread", "a bridge over the river", "rye", "river lamp bread"))
]


def open_stage(spec, documents=DOCUMENTS, model=None, folder=None):
    collection = Collection({str(d.id): d for d in documents}, "digest", {})
    parsed = parse_method(spec, "first stage", "k1=1.2")
    return open_first_stage(parsed, collection, lambda: model or LetterEmbeddings(), folder)


def by_vectors():
    store = FaissVectorStore(LetterEmbeddings(), kind="flat")
    store.add_documents(DOCUMENTS)
    return PassageRetriever(store=store)


def by_words(**parameters):
    return BM25Retriever.from_documents(DOCUMENTS, **parameters)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bm25", by_words),
        ("bm25:k1=2:b=0", partial(by_words, k1=2.0, b=0.0)),
        ("dense", by_vectors),
        ("hybrid:fusion=score:k1=1.5",
         lambda: HybridRetriever(retrievers=[by_vectors(), by_words(k1=1.5)], fusion="score")),
    ],
)  # fmt: skip
def test_a_stage_ranks_as_a_retriever_over_its_documents_does(spec, expected, monkeypatch):
    monkeypatch.setattr("rag_posfix.evaluation.ranking.first_stage.DOCUMENTS_PER_BATCH", 7)
    retriever = expected()
    ranked = retrieve(open_stage(spec), TOPICS, 7, RankJournal()).rankings
    for topic in TOPICS:
        found = [(d.id, d.metadata["relevance_score"]) for d in retriever.retrieve(topic.question, 7)]
        assert list(zip(ranked[topic.id].ids, ranked[topic.id].scores, strict=True)) == found
    assert len(ranked["0"].ids) > 1


def test_vectors_of_an_earlier_run_are_not_computed_again(tmp_path):
    first, again = LetterEmbeddings(), LetterEmbeddings()
    open_stage("dense", model=first, folder=tmp_path)
    open_stage("dense", model=again, folder=tmp_path)
    assert (len(first.texts), len(again.texts)) == (50, 0)  # of 60 texts 50 differ


def test_documents_without_text_are_not_searched():
    blank = Document(id="blank", page_content=" \n")
    stage = open_stage("dense", [DOCUMENTS[0], blank])
    assert retrieve(stage, TOPICS[:1], 7, RankJournal()).rankings["0"].ids == ("d0",)
    with pytest.raises(EvaluationError, match="no document of the corpus has text"):
        open_stage("bm25", [blank])
