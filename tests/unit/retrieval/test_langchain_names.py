"""What langchain's stores and retrievers are called and can do."""

import pytest
from langchain_core.documents import Document

from rag_posfix import BM25Retriever, FaissVectorStore
from rag_posfix.errors import ConfigError
from tests.support.letter_embeddings import LetterEmbeddings

TEXTS = ["aaab", "aaaab", "bbbbbc", "dddd"]


@pytest.fixture
def store():
    return FaissVectorStore.from_texts(TEXTS, LetterEmbeddings(), ids=["one", "two", "three", "four"])


def names(documents):
    return [document.id for document in documents]


def test_mmr_prefers_variety_over_a_second_document_of_the_same_kind(store):
    assert names(store.similarity_search("aaaa b", k=2)) == ["two", "one"]
    varied = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.1})
    found = varied.invoke("aaaa b")
    assert names(found)[0] == "two"
    assert names(found)[1] in ("three", "four")
    relevant = store.max_marginal_relevance_search("aaaa b", k=2, lambda_mult=1)
    assert names(relevant) == ["two", "one"]


def test_mmr_chooses_among_the_nearest_that_pass_the_filter(store):
    assert names(store.max_marginal_relevance_search("aaaab", k=3, fetch_k=3, lambda_mult=0)) != []
    vector = LetterEmbeddings().embed_query("aaaab")
    found = store.max_marginal_relevance_search_by_vector(vector, k=2, filter=lambda metadata: False)
    assert found == []
    assert FaissVectorStore(LetterEmbeddings()).max_marginal_relevance_search("a") == []


@pytest.mark.parametrize("options", [{"fetch_k": 0}, {"lambda_mult": 1.5}, {"k": 0}, {"top": 3}])
def test_numbers_out_of_range_are_refused(store, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        store.max_marginal_relevance_search("a", **options)


def test_a_store_is_saved_and_loaded_under_langchains_names(store, tmp_path):
    store.save_local(tmp_path / "index")
    loaded = FaissVectorStore.load_local(
        tmp_path / "index", LetterEmbeddings(), allow_dangerous_deserialization=True, mmap=True
    )
    assert names(loaded.similarity_search("dddd", k=1)) == ["four"]
    assert names(BM25Retriever.load_local(tmp_path / "index", k=2).invoke("dddd")) == ["four"]


def test_words_are_searched_in_texts_and_in_documents():
    made = BM25Retriever.from_texts(["the river", "the oven"], [{"n": 1}, {"n": 2}], ids=["river", None], k=1)
    (found,) = made.invoke("river")
    assert (found.id, found.metadata["n"]) == ("river", 1)
    documents = BM25Retriever.from_documents([Document("the river"), Document("the oven")])
    assert [one.page_content for one in documents.invoke("oven")] == ["the oven"]
    with pytest.raises(ConfigError, match="1 metadatas for 2 texts; pass one per text"):
        BM25Retriever.from_texts(["a", "b"], [{}])
