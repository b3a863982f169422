import pytest

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.indexing import build_index
from rag_posfix.retrieval.ingest.splitting import PassageSize


def test_files_become_an_index_with_progress(embeddings, tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(300)))
    seen = []
    manifest = build_index(
        [tmp_path / "a.txt"],
        tmp_path / "index",
        embeddings,
        progress=lambda done, total: seen.append((done, total)),
        size=PassageSize(words=2),
    )
    assert manifest.count == 300
    assert seen == [(128, 300), (256, 300), (300, 300)]
    assert len(FaissVectorStore.load(tmp_path / "index", embeddings)) == 300


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_read(embeddings, tmp_path):
    (tmp_path / "mine.bin").write_bytes(b"")
    with pytest.raises(RetrievalError, match="exists and is not an index"):
        build_index([tmp_path / "missing.txt"], tmp_path, embeddings)


def test_an_index_stays_when_the_new_corpus_is_empty(store, embeddings, tmp_path):
    store.save(tmp_path / "index")
    (tmp_path / "empty.md").write_text("")
    with pytest.raises(RetrievalError, match="no documents"):
        build_index([tmp_path / "empty.md"], tmp_path / "index", embeddings)
    assert len(FaissVectorStore.load(tmp_path / "index", embeddings)) == 3
