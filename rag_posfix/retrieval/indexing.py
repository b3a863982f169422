"""Builds an index from files, and updates it incrementally: only new texts are embedded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.bm25_index import BM25Index
from rag_posfix.retrieval.index.documents import IndexEntry, searchable_text
from rag_posfix.retrieval.index.embedded_texts import EmbeddedTexts, embedded_texts
from rag_posfix.retrieval.index.file_formats import BM25_ROLES
from rag_posfix.retrieval.index.folder_lock import locked
from rag_posfix.retrieval.index.storage import IndexManifest, check_writable, read_entries, read_manifest
from rag_posfix.retrieval.index.vector_index import IndexKind
from rag_posfix.retrieval.ingest.ingest import FilesRead, no_documents, read_files
from rag_posfix.retrieval.ingest.skipped import SkippedFile
from rag_posfix.retrieval.ingest.splitting import PassageSize

_TEXTS_PER_STEP = 256
"""Texts that are embedded together and then kept: several batches for each core."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """The result of an update.

    Attributes:
        manifest: Manifest of the updated index.
        added: Number of passages with new ids.
        changed: Number of passages with another text or other metadata.
        unchanged: Number of unchanged passages, those of other paths included.
        removed: Number of removed passages.
        embedded: Number of texts that were embedded.
        gone: Documents that are not in the index any more, former versions of passages with another text included.
        continued: Number of texts whose vectors were kept from an update that did not finish.
        skipped: Files that gave no document of their own.
    """

    manifest: IndexManifest
    added: int
    changed: int
    unchanged: int
    removed: int
    embedded: int
    gone: tuple[Document, ...]
    continued: int = 0
    skipped: tuple[SkippedFile, ...] = ()


@dataclass(slots=True)
class _Changes:
    """The changes that an update makes to a store.

    Attributes:
        put: New texts by id: their vectors are needed.
        replace: Entries with another document or other files, but the same text: their vectors stay.
        remove: Ids of passages to remove.
        gone: The documents that ``put`` and ``remove`` take out of the index.
        added: As in ``IndexUpdate``; likewise ``changed`` and ``unchanged``.
    """

    put: dict[str, IndexEntry] = field(default_factory=dict)
    replace: list[IndexEntry] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    gone: list[Document] = field(default_factory=list)
    added: int = 0
    changed: int = 0
    unchanged: int = 0


def build_index(
    paths: Iterable[str | Path],
    folder: str | Path,
    embeddings: Embeddings,
    *,
    progress: Progress | None = None,
    size: PassageSize | None = None,
    kind: IndexKind = "auto",
) -> IndexManifest:
    """Read files, embed their passages and save them as an index, replacing an existing one.

    Nothing is written before all passages are embedded; an existing index in ``folder`` can be used until the new one
    replaces it.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an existing index.
        size: Limits of a passage; the defaults of PassageSize if None.
        kind: As for ``FaissVectorStore``.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, or writing failed.
    """
    update = update_index(paths, folder, embeddings, rebuild=True, progress=progress, size=size, kind=kind)
    return update.manifest


def update_index(
    paths: Iterable[str | Path],
    folder: str | Path,
    embeddings: Embeddings,
    *,
    rebuild: bool = False,
    progress: Progress | None = None,
    reading: Progress | None = None,
    size: PassageSize | None = None,
    kind: IndexKind = "auto",
    strict: bool = True,
) -> IndexUpdate:
    """Bring an index up to date with its files; build it if there is none.

    All files are read. A text whose vector is in the index, under any id, is not embedded again. Passages of files
    under ``paths`` that are not found any more are removed; passages of other files stay. Words are counted again.

    Searches then find what they find in an index that is built from the same files (with a graph: up to its
    approximation). The folder is one complete index at every moment, the old one or the new one. If nothing changed,
    nothing is written. Vectors are kept beside the folder as they are computed, so that an update that was stopped
    continues where it was. One process writes an index at a time.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an existing index.
        embeddings: The embedding model; that of an existing index.
        rebuild: Replace an existing index, which may be damaged or of another model, without reusing its vectors or
            keeping its other passages.
        reading: Called with (files read, files to read).
        size: Limits of a passage; the defaults of PassageSize if None.
        kind: As for ``FaissVectorStore``.
        strict: Raise at the first file that cannot be read; otherwise skip it. What an existing index holds of an
            unreadable file stays.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, another process is writing the index, an
            existing index is damaged or of another model, an id belongs to another document there, no document would
            be left, or writing failed.
    """
    folder, places = Path(folder), [Path(path) for path in paths]
    check_writable(folder)
    with locked(folder):
        read = read_files(places, size=size, strict=strict, progress=reading)
        return _update(folder, places, read, embeddings, rebuild, progress, kind)


def _update(
    folder: Path,
    places: Sequence[Path],
    read: FilesRead,
    embeddings: Embeddings,
    rebuild: bool,
    progress: Progress | None,
    kind: IndexKind,
) -> IndexUpdate:
    existing = (folder / "manifest.json").exists() and not rebuild
    if not read.entries and not existing:
        raise no_documents(places, read.skipped)
    replaced = _readable_documents(folder) if rebuild else {}
    store = (
        FaissVectorStore.load(folder, embeddings, kind=kind) if existing else FaissVectorStore(embeddings, kind=kind)
    )
    manifest = read_manifest(folder) if existing else None
    old = _entries_by_id(store, manifest)
    unreadable = {skipped.file for skipped in read.skipped if skipped.kind == "unreadable"}
    changes = _compare(old, {str(entry.document.id): entry for entry in read.entries}, places, unreadable)
    if len(old) + changes.added == len(changes.remove):
        raise no_documents(places, read.skipped)
    with embedded_texts(folder, embedding_identity(embeddings)) as kept:
        embedded, continued = _apply(store, old, changes, kept, progress)
        if manifest is None or changes.put or changes.replace or changes.remove or BM25_ROLES[0] not in manifest.files:
            _, _, texts = store.table.snapshot()
            manifest = store.save(folder, bm25=BM25Index.build(texts))
    return IndexUpdate(
        manifest=manifest,
        added=changes.added,
        changed=changes.changed,
        unchanged=changes.unchanged,
        removed=len(changes.remove) + len(replaced.keys() - changes.put.keys()),
        embedded=embedded,
        gone=(*changes.gone, *(one for one in replaced.values() if not _has_same_text(changes.put, one))),
        continued=continued,
        skipped=read.skipped,
    )


def _has_same_text(entries: dict[str, IndexEntry], document: Document) -> bool:
    entry = entries.get(str(document.id))
    return entry is not None and searchable_text(entry.document) == searchable_text(document)


def _readable_documents(folder: Path) -> dict[str, Document]:
    """Return the documents of an index that will be replaced; none if it cannot be read."""
    try:
        return {str(entry.document.id): entry.document for entry in read_entries(folder).values()}
    except RetrievalError:
        return {}


def _entries_by_id(store: FaissVectorStore, manifest: IndexManifest | None) -> dict[str, IndexEntry]:
    entries = list(store.table.entries.values())
    if manifest is not None and manifest.version == 1:  # has no files per document; their only file is "source"
        entries = [IndexEntry(e.document, (str(e.document.metadata.get("source", "")),)) for e in entries]
    return {str(entry.document.id): entry for entry in entries}


def _compare(
    old: dict[str, IndexEntry], found: dict[str, IndexEntry], places: Sequence[Path], unreadable: set[str]
) -> _Changes:
    """Return the changes from ``old`` to the documents found in ``places`` and those of ``old`` in other places."""
    changes = _Changes()
    roots = [os.path.abspath(place) for place in places]
    unread = {os.path.abspath(file) for file in unreadable}
    for name, entry in found.items():
        before = old.get(name)
        if before is None:
            changes.put[name] = entry
            changes.added += 1
            continue
        other_files = tuple(file for file in before.files if _stays(file, roots, unread))
        same_text = searchable_text(before.document) == searchable_text(entry.document)
        if other_files and not same_text:
            raise RetrievalError(
                f"id {name!r} belongs to different documents in {entry.files[0]} and, from an earlier indexing, in "
                f"{other_files[0]}; make the ids distinct, or index both files again"
            )
        now = IndexEntry(entry.document, entry.files + tuple(file for file in other_files if file not in entry.files))
        changed = before.document != now.document
        if not same_text:
            changes.put[name] = now
            changes.gone.append(before.document)
        elif changed or before.files != now.files:
            changes.replace.append(now)
        changes.changed += changed
        changes.unchanged += not changed
    for name, entry in old.items():
        if name in found:
            continue
        other_files = tuple(file for file in entry.files if _stays(file, roots, unread))
        if entry.files and not other_files:
            changes.remove.append(name)
            changes.gone.append(entry.document)
            continue
        if other_files != entry.files:
            changes.replace.append(IndexEntry(entry.document, other_files))
        changes.unchanged += 1
    return changes


def _apply(
    store: FaissVectorStore,
    old: dict[str, IndexEntry],
    changes: _Changes,
    kept: EmbeddedTexts | None,
    progress: Progress | None,
) -> tuple[int, int]:
    """Apply the changes to the store; return the number of texts that were embedded, and of those kept before."""
    import numpy as np

    texts = {name: searchable_text(entry.document) for name, entry in changes.put.items()}
    wanted = set(texts.values())
    old_texts = ((searchable_text(entry.document), name) for name, entry in old.items() if wanted)
    known = {text: name for text, name in old_texts if text in wanted}
    rows = dict(zip(known, store.vectors_of(list(known.values())), strict=True))
    # Sorted by length, so that the texts of a batch need little padding; by content, so that batches do not depend on
    # the order of the paths.
    new = sorted(wanted - set(known), key=lambda text: (len(text), text))
    before = {} if kept is None else kept.get(new)
    rows.update(before)
    rest = [text for text in new if text not in before]
    for start in range(0, len(rest), _TEXTS_PER_STEP):
        batch = rest[start : start + _TEXTS_PER_STEP]
        vectors = store.embed_texts(batch)
        if kept is not None:
            kept.put(batch, vectors)
        rows.update(zip(batch, vectors, strict=True))
        if progress is not None:
            progress(len(before) + start + len(batch), len(new))
    store.delete(changes.remove)
    if changes.replace:
        store.table.replace(changes.replace)
    if texts:
        names = sorted(texts, key=lambda name: (len(texts[name]), name))
        store.put_entries({name: changes.put[name] for name in names}, np.stack([rows[texts[name]] for name in names]))
    return len(rest), len(before)


def _stays(file: str, roots: Sequence[str], unread: set[str]) -> bool:
    """Return whether what the index holds of a file stays: it is elsewhere, or could not be read now."""
    place = os.path.abspath(file)
    under = any(place == root or place.startswith(root.rstrip(os.sep) + os.sep) for root in roots)
    return not under or place in unread
