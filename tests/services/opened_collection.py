"""Opens a collection as another process sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rag_posfix_api.collections.collection import Collection
from rag_posfix_api.collections.store import Collections
from tests.support.letter_embeddings import LetterEmbeddings


def opened(folder: Path, removed: Any = None, name: str = "notes", **options: Any) -> Collection:
    """Return a collection as another process sees it, which is made if it is not there."""
    collections = Collections(folder, options.pop("max_collections", 10), options.pop("max_documents", 1000))
    embeddings = options.pop("embeddings", None) or LetterEmbeddings()
    if name not in [info.name for info in collections.of("acme")]:
        collections.create("acme", name, embeddings)
    return collections.get("acme", name, embeddings, removed or (lambda documents: None))


def texts(collection: Collection) -> dict[str, str]:
    """Return the texts of documents by id; the passages of a long document are joined by spaces."""
    passages: dict[str, list[str]] = {}
    for document in collection.documents():
        passages.setdefault(document.metadata.get("document_id", str(document.id)), []).append(document.page_content)
    return {name: " ".join(parts) for name, parts in passages.items()}
