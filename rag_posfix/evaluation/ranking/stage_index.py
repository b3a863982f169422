"""What a first stage searches: vectors and word statistics of the documents, made once, and retrievers over them.

Vectors and statistics are made in one process and may be searched in others: a search needs the ids of the documents,
and not their texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.collection import Collection
from rag_posfix.evaluation.progress import Progress
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rag_posfix.retrieval.bm25 import BM25Index
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

DOCUMENTS_PER_BATCH = 128
BATCHES_PER_SAVE = 16

_BM25_PARAMETERS = ("k1", "b")

EmbedBatches = Callable[[Sequence[list[str]]], "Iterable[tuple[int, NDArray[np.float32]]]"]
"""Yields (index, one unit vector per text) of batches of texts, in any order."""


def documents_with_text(collection: Collection) -> list[Document]:
    """Return the documents that are indexed.

    Raises:
        EvaluationError: no document has text.
    """
    documents = [document for document in collection.documents.values() if document.page_content.strip()]
    if not documents:
        raise EvaluationError("no document of the corpus has text; give another corpus")
    return documents


def stored_ids(documents: Iterable[Document]) -> list[str]:
    """Return the ids that an index has for documents."""
    from rag_posfix.retrieval.index.documents import stored_id

    return [stored_id(document) for document in documents]


def searched_texts(documents: Iterable[Document]) -> list[str]:
    """Return the texts that are embedded and whose words are counted: title and text."""
    from rag_posfix.retrieval.index.documents import searchable_text, stored_copy

    return [searchable_text(stored_copy(document)) for document in documents]


def embedded(embeddings: Embeddings, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return a unit vector for each text.

    Args:
        texts: A batch; the vector of a text may differ in its last digits with the batch.

    Raises:
        RetrievalError: the model returned unusable vectors.
    """
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    return FaissVectorStore(embeddings, kind="flat").embed_texts(texts)


def open_vectors(
    documents: Sequence[Document],
    embeddings: Embeddings,
    digest: str,
    embed: EmbedBatches,
    folder: Path | None,
    progress: Progress,
) -> FaissVectorStore:
    """Return a store with the vectors of all documents, which is saved as they are made: an interrupt loses few.

    Args:
        embeddings: The embedding model, or what has its identity.
        digest: Hash of the collection, which names the saved store together with the model.
        embed: Embeds what the saved store lacks.
        folder: Where the store is kept for later runs; None keeps it in memory.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        RetrievalError: the saved store is damaged, or the model returned unusable vectors.
    """
    from rag_posfix.retrieval.embeddings import embedding_identity

    named = content_hash(embedding_identity(embeddings), digest)
    index = None if folder is None else folder / f"index-{named[:16]}"
    store = _store(index, embeddings)
    known = set(store.table.ids())
    # Texts of like length share a batch, which spares padding; with the id, batches are the same in every run.
    missing = sorted(
        (document for document in documents if str(document.id) not in known),
        key=lambda document: (len(document.page_content), str(document.id)),
    )
    batches = [missing[start : start + DOCUMENTS_PER_BATCH] for start in range(0, len(missing), DOCUMENTS_PER_BATCH)]
    with progress("embedding") as report:
        made = embed([searched_texts(batch) for batch in batches])
        for number, (position, rows) in enumerate(made, start=1):
            store.add_vectors(batches[position], rows)
            report(len(store), len(documents))
            if index is not None and (number % BATCHES_PER_SAVE == 0 or number == len(batches)):
                index.parent.mkdir(parents=True, exist_ok=True)
                store.save(index)
    return store


def vectors_retriever(names: Sequence[str], rows: NDArray[np.float32], embeddings: Embeddings) -> Retriever:
    """Return a retriever over vectors that a store returned; the documents that it finds have no text.

    Args:
        rows: A unit vector for each.
        embeddings: The model that embeds questions.
    """
    from rag_posfix.retrieval.dense import PassageRetriever
    from rag_posfix.retrieval.faiss_store import FaissVectorStore
    from rag_posfix.retrieval.index.document_vectors import DocumentVectors
    from rag_posfix.retrieval.index.documents import IndexEntry

    # Not through the store, which would compute the length of each vector again and could change its last digit.
    contents = DocumentVectors("flat")
    contents.put({name: IndexEntry(_without_text(name)) for name in names}, rows)
    return PassageRetriever(store=FaissVectorStore(embeddings, kind="flat", contents=contents))


def count_words(texts: Sequence[str], parameters: Mapping[str, Any]) -> BM25Index:
    """Return the word statistics of texts."""
    from rag_posfix.retrieval.bm25 import BM25Index

    own = {name: value for name, value in _given(parameters).items() if name in _BM25_PARAMETERS}
    return BM25Index.build(texts, **own)


def words_retriever(names: Sequence[str], counted: BM25Index) -> Retriever:
    """Return a retriever over word statistics; the documents that it finds have no text.

    Args:
        counted: Their statistics, in the same order.
    """
    import numpy as np

    from rag_posfix.retrieval.bm25 import BM25Retriever
    from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry

    table = DocumentTable()
    keys = table.add(IndexEntry(_without_text(name)) for name in names)
    return BM25Retriever(table=table, k1=counted.k1, b=counted.b, counted=(np.asarray(keys, dtype=np.int64), counted))


def retriever_of(retrievers: Sequence[Retriever], parameters: Mapping[str, Any]) -> Retriever:
    """Return the one retriever that is given, or the fusion of two.

    Args:
        retrievers: One, or one by embeddings and one by words.
    """
    if len(retrievers) == 1:
        return retrievers[0]
    from rag_posfix.retrieval.hybrid import HybridRetriever

    own = {name: value for name, value in _given(parameters).items() if name not in _BM25_PARAMETERS}
    return HybridRetriever(retrievers=retrievers, **own)


def _store(index: Path | None, embeddings: Embeddings) -> FaissVectorStore:
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    if index is not None and index.is_dir():  # flat: candidates are the nearest, whatever the size of the collection
        return FaissVectorStore.load(index, embeddings, kind="flat")
    return FaissVectorStore(embeddings, kind="flat")


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}


def _without_text(name: str) -> Document:
    return Document(id=name, page_content="")
