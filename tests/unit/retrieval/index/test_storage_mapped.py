import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.bm25 import BM25Index, BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index import file_formats
from rag_posfix.retrieval.index.documents import searchable_text
from rag_posfix.retrieval.index.file_formats import BM25_ROLES
from rag_posfix.retrieval.index.storage import read_manifest

EMBEDDINGS = DeterministicFakeEmbedding(size=16)


@pytest.fixture(autouse=True)
def graphs_are_walked(monkeypatch):
    monkeypatch.setattr(file_formats, "EXACT_UNTIL", 0)


@pytest.fixture(params=["flat", "hnsw"])
def folder(request, tmp_path):
    """An index of 300 documents with word statistics, 20 of them deleted again."""
    store = FaissVectorStore(EMBEDDINGS, kind=request.param)
    texts = [f"text number {n} über 数据" for n in range(300)]
    store.add_texts(texts, [{"n": n % 3} for n in range(300)], ids=[f"{n:03}" for n in range(300)])
    store.delete([f"{n:03}" for n in range(0, 40, 2)])
    words = BM25Index.build(searchable_text(document) for document in store.documents())
    store.save(tmp_path / "index", bm25=words)
    return tmp_path / "index"


def results(store):
    return [
        store.similarity_search_with_score("text number 7", 5),
        store.similarity_search_with_score("text number 7", 5, filter={"n": 1}),
        store.get_by_ids(["007", "000", "299"]),
    ]


@pytest.mark.parametrize("verify", [True, False])
def test_a_mapped_store_finds_what_a_loaded_one_finds(folder, verify):
    loaded = FaissVectorStore.load(folder, EMBEDDINGS)
    mapped = FaissVectorStore.load(folder, EMBEDDINGS, mmap=True, verify=verify)
    assert results(mapped) == results(loaded)
    assert len(mapped) == len(loaded) == 280
    assert mapped.documents() == loaded.documents()


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.add_texts(["x"]),
        lambda store: store.add_vectors([Document("x")], np.ones((1, 16))),
        lambda store: store.delete(["001"]),
        lambda store: store.delete(),
        lambda store: store.compact(),
    ],
)
def test_a_mapped_store_refuses_changes_and_stays_as_it_was(folder, change):
    store = FaissVectorStore.load(folder, EMBEDDINGS, mmap=True)
    before = results(store)
    with pytest.raises(ConfigError, match="loaded with mmap=True and cannot be changed"):
        change(store)
    assert results(store) == before


def test_a_mapped_store_can_be_saved_elsewhere(folder, tmp_path):
    mapped = FaissVectorStore.load(folder, EMBEDDINGS, mmap=True)
    mapped.save(tmp_path / "copy")
    assert results(FaissVectorStore.load(tmp_path / "copy", EMBEDDINGS)) == results(mapped)


def test_vectors_of_deleted_documents_are_counted_and_forgotten_by_compacting(folder):
    store = FaissVectorStore.load(folder, EMBEDDINGS)
    graph = read_manifest(folder).removed > 0
    assert read_manifest(folder).removed == (20 if graph else 0)
    before = results(store)
    store.compact()
    assert results(store) == before
    manifest = store.save(folder)
    assert (manifest.count, manifest.removed) == (280, 0)
    assert results(FaissVectorStore.load(folder, EMBEDDINGS)) == before


@pytest.mark.parametrize("mmap", [True, False])
def test_word_statistics_are_the_same_after_loading(folder, mmap):
    store = FaissVectorStore.load(folder, EMBEDDINGS)
    fresh = BM25Retriever.from_documents(store.documents())
    alone = BM25Retriever.load(folder, mmap=mmap)
    shared = BM25Retriever.load(folder, table=store.table, mmap=mmap)
    for question in ("number 7", "数据", "text", "ÜBER 299"):
        expected = fresh.retrieve(question, 10)
        assert alone.retrieve(question, 10) == shared.retrieve(question, 10) == expected != []


def test_an_index_without_word_statistics_has_them_counted(store, embeddings, tmp_path):
    store.save(tmp_path / "index")
    assert not set(BM25_ROLES) & set(read_manifest(tmp_path / "index").files)
    assert [found.id for found in BM25Retriever.load(tmp_path / "index").retrieve("aab", 3)] == ["two"]


def test_word_statistics_of_other_documents_are_counted_anew(folder):
    store = FaissVectorStore.load(folder, EMBEDDINGS)
    store.delete(["007"])
    retriever = BM25Retriever.load(folder, table=store.table)
    assert "007" not in [found.id for found in retriever.retrieve("number 7", 5)]


def test_word_statistics_of_another_number_of_documents_are_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="word statistics of 1 documents do not fit a store of 3"):
        store.save(tmp_path / "index", bm25=BM25Index.build(["x"]))
