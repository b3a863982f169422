"""Retrievers over vectors and word statistics that were made elsewhere find what retrievers over documents find."""

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection
from rag_posfix.evaluation.ranking.first_stage import (
    count_words,
    documents_with_text,
    embedded,
    open_vectors,
    retriever_of,
    searched_texts,
    stored_ids,
    vectors_retriever,
    words_retriever,
)
from rag_posfix.evaluation.record import silent
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.dense import PassageRetriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from tests.support.letter_embeddings import LetterEmbeddings

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
            yield index, embedded(embeddings, texts)

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
