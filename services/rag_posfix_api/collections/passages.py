"""The passages of a collection in memory, and what is stored of each next to its text: a vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.retrieval.base import PassageRetriever, QuestionRetriever
from rag_posfix.retrieval.faiss_store import DeleteListener, FaissVectorStore
from rag_posfix.retrieval.index.document_file import StoredRow
from rag_posfix.retrieval.index.documents import DocumentTable, IndexEntry, searchable_text
from rag_posfix.retrieval.ingest.passages import PassageSize, split_document
from rag_posfix_api.http.errors import ConflictError, TooLargeError


class Passages(Protocol):
    """The passages of a collection, as they were committed to its file."""

    @property
    def table(self) -> DocumentTable: ...

    def delete(self, ids: list[str]) -> object: ...

    def put_rows(self, rows: Sequence[StoredRow]) -> None:
        """Add rows of the file, replacing those with the same ids."""

    def missing(self, entries: Mapping[str, IndexEntry], prepared: Mapping[str, bytes]) -> list[str]:
        """Return the keys of what ``prepare`` has to do before ``entries`` can be stored."""

    def prepare(self, keys: Sequence[str], entries: Mapping[str, IndexEntry]) -> dict[str, bytes]:
        """Return what rows store of the passages of some keys."""

    def row_bytes(self, entry: IndexEntry, prepared: Mapping[str, bytes]) -> bytes:
        """Return what the row of a new or changed passage stores next to its text."""

    def retriever(self, k: int) -> QuestionRetriever: ...


class EmbeddedPassages(FaissVectorStore):
    """Passages whose vectors are in the file and in memory. All of them are compared in a search; keys are texts."""

    def __init__(self, embeddings: Embeddings, removed: DeleteListener) -> None:
        super().__init__(embeddings, kind="flat")  # a graph would be built at every start
        self.add_delete_listener(removed)

    def put_rows(self, rows: Sequence[StoredRow]) -> None:
        import numpy as np

        vectors = np.stack([np.frombuffer(vector or b"", dtype="<f4") for _, _, vector in rows])
        self.put_entries({str(entry.document.id): entry for _, entry, _ in rows}, vectors)

    def missing(self, entries: Mapping[str, IndexEntry], prepared: Mapping[str, bytes]) -> list[str]:
        """Return the texts whose vectors are neither stored under the same id nor in ``prepared``."""
        texts: dict[str, None] = {}
        for name, entry in entries.items():
            text, stored = searchable_text(entry.document), self.table.entry_of(name)
            if text not in prepared and (stored is None or searchable_text(stored.document) != text):
                texts[text] = None
        return list(texts)

    def prepare(self, keys: Sequence[str], entries: Mapping[str, IndexEntry]) -> dict[str, bytes]:
        return {text: row.astype("<f4").tobytes() for text, row in zip(keys, self.embed_texts(keys), strict=True)}

    def row_bytes(self, entry: IndexEntry, prepared: Mapping[str, bytes]) -> bytes:
        vector = prepared.get(searchable_text(entry.document))
        return self.vectors_of([str(entry.document.id)])[0].astype("<f4").tobytes() if vector is None else vector

    def retriever(self, k: int) -> QuestionRetriever:
        return PassageRetriever(store=self, k=k)


def split_documents(
    documents: Sequence[Document], size: PassageSize, most: int, give_way: Callable[[], None]
) -> dict[str, dict[str, IndexEntry]]:
    """Return the entries of each document by their ids: itself, or its passages if it is longer than a passage.

    Raises:
        TooLargeError: there are more than ``most`` passages.
    """
    entries: dict[str, dict[str, IndexEntry]] = {}
    for document in documents:
        give_way()
        name, passages = str(document.id), split_document(document, size)
        if passages == [document]:
            entries[name] = {name: IndexEntry(document)}
        else:
            for passage in passages:
                passage.metadata.setdefault("document_id", name)
            entries[name] = {str(passage.id): IndexEntry(passage, (name,)) for passage in passages}
        if sum(map(len, entries.values())) > most:
            raise TooLargeError(
                f"the documents of the request are more than {most} passages, which a collection may have; send fewer "
                "or shorter documents",
                param="documents",
            )
    return entries


def check_ids(stored: Mapping[str, IndexEntry], entries: Mapping[str, IndexEntry]) -> None:
    """Raise ConflictError if an id is that of a passage of one document, and of another document or its passage."""
    for name, entry in entries.items():
        other = stored.get(name)
        owners = {file for item in (entry, other) if item for file in item.files or (name,)}
        if other is not None and len(owners) > 1:
            raise ConflictError(
                f"id {name!r} belongs to two of the documents {', '.join(map(repr, sorted(owners)))}, of which one is "
                f"stored as passages {name.rpartition('#')[0]}#1, #2, ...; choose another id",
                param="documents",
            )
