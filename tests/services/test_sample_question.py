"""GET /v1/posfix/sample: a question about the index, from what the caller of a key may read."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.documents import Document

from rag_posfix.retrieval.base import PassageRetriever, first_passages
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from rag_posfix_api.page.routes import sample_question
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import BRIDGE, HARBOUR, ListRetriever, client_for, make_pipeline
from tests.support.tenants import Tenants, pipeline_with_embeddings

PATH = "/v1/posfix/sample"


def index(**metadata):
    """An index of two passages, each with metadata: ``title=("a", "b")``."""
    fields = [dict(zip(metadata, values, strict=True)) for values in zip(*metadata.values(), strict=True)] or [{}, {}]
    return BM25Retriever.from_documents(
        [
            Document(text, id=name, metadata=each)
            for name, text, each in zip("ab", (BRIDGE, HARBOUR), fields, strict=True)
        ]
    )


def asked(client):
    response = client.get(PATH)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    return response.json()["question"]


def test_the_question_is_of_the_first_passage_and_no_model_is_asked():
    generator = OrderBiasedGenerator()
    client = client_for(make_pipeline(generator, retriever=index(title=("The bridge", "The harbour"))))
    assert [asked(client) for _ in range(2)] == ["What is said about The bridge?"] * 2
    assert generator.asked == []


def test_without_an_index_or_with_one_that_cannot_be_listed_there_is_no_question():
    assert asked(client_for()) is None
    assert asked(client_for(make_pipeline(retriever=ListRetriever(BRIDGE)))) is None


def test_a_key_with_a_filter_and_a_tenant_get_a_question_about_what_they_may_read(tmp_path: Path):
    retriever = index(title=("The bridge", "The harbour"), owner=("acme", "bolt"))
    tenants = Tenants(tmp_path, pipeline_with_embeddings(retriever=retriever), tenant_field="owner")
    questions = {name: asked(tenants.client(name)) for name in ("acme", "bolt", "nobody")}
    assert questions == {
        "acme": "What is said about The bridge?", "bolt": "What is said about The harbour?", "nobody": None,
    }  # fmt: skip
    filtered = Tenants(tmp_path / "filtered", pipeline_with_embeddings(retriever=retriever))
    assert (
        asked(filtered.client("any", scopes=("read",), filter={"owner": "bolt"})) == "What is said about The harbour?"
    )


def test_a_service_that_keeps_its_text_back_builds_no_question_from_it():
    passage = [Document("It stands on Cape Sorrin, in the north.", id="a")]
    pipeline = make_pipeline(retriever=BM25Retriever.from_documents(passage))
    assert asked(client_for(pipeline)) == "What is said about Cape Sorrin?"
    assert asked(client_for(pipeline, source_text=False)) is None


@pytest.mark.parametrize(
    ("title", "text", "expected"),
    [
        ("FAQ > How do I cancel?", "By post.", "How do I cancel?"),
        ("Guide > Opening hours", "Ten to six.", "What is said about Opening hours?"),
        ("如何取消\uff1f", "请写信", "如何取消\uff1f"),
        ("x" * 81, "Cape Sorrin.", None),
        ("", "no name here.", None),
        ("", "Der Alte Hafen friert zu.", "What is said about Der Alte Hafen?"),
    ],
)
def test_a_question_is_the_last_heading_or_about_it_or_about_a_name(title, text, expected):
    assert sample_question(Document(text, metadata={"title": title}), with_text=True) == expected


def test_passages_are_listed_from_vectors_words_and_both_with_the_filter_of_the_retriever():
    documents = [
        Document(text, id=name, metadata={"n": n}) for n, (name, text) in enumerate(zip("abc", "xyz", strict=True))
    ]
    store = FaissVectorStore(LetterEmbeddings())
    store.add_documents(documents)
    words = BM25Retriever.from_documents(documents, filter={"n": {"$gt": 0}})
    vectors = PassageRetriever(store=store, filter=lambda metadata: metadata["n"] < 2)
    both = HybridRetriever(retrievers=[vectors, words])

    def ids(retriever, metadata_filter=None, count=3):
        return "".join(str(passage.id) for passage in first_passages(retriever, metadata_filter, count))

    assert (ids(words), ids(vectors), ids(both)) == ("bc", "ab", "ab")
    assert ids(words, {"n": 2}) == "c"
    assert ids(words, count=1) == ""  # the first passage, which the filter leaves out
    first_passages(vectors, None, 1)[0].metadata["n"] = 9
    assert ids(vectors) == "ab"  # copies
