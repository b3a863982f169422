"""Files to a saved index in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from langchain_core.embeddings import Embeddings

from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index_files import IndexManifest, check_writable
from rag_posfix.retrieval.ingest import read_documents
from rag_posfix.retrieval.splitting import PassageSize

__all__ = ["build_index"]

_DOCUMENTS_PER_REPORT = 128


def build_index(
    paths: Iterable[str | Path],
    folder: str | Path,
    embeddings: Embeddings,
    *,
    progress: Callable[[int, int], None] | None = None,
    size: PassageSize | None = None,
) -> IndexManifest:
    """Read files, embed their passages and save them as an index.

    Nothing is written before all passages are embedded; an index that is already in ``folder`` stays usable until
    the new one takes its place.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an index already.
        embeddings: The model to build with.
        progress: Called with (passages embedded, passages in all).
        size: Bounds of a passage; the defaults of PassageSize if None.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, or writing failed.
    """
    folder = Path(folder)
    check_writable(folder)
    documents = read_documents(paths, size=size)
    store = FaissVectorStore(embeddings)
    # Texts of like length share a batch, which spares padding; with the id, batches do not depend on the paths' order.
    documents.sort(key=lambda document: (len(document.page_content), str(document.id)))
    for start in range(0, len(documents), _DOCUMENTS_PER_REPORT):
        store.add_documents(documents[start : start + _DOCUMENTS_PER_REPORT])
        if progress is not None:
            progress(len(store), len(documents))
    return store.save(folder)
