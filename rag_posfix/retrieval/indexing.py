"""Files to a saved index: built in one call, and brought up to date in one, where only what is new is embedded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.bm25_statistics import BM25Index
from rag_posfix.retrieval.index.documents import Record, searchable_text
from rag_posfix.retrieval.index.manifest import IndexManifest, check_writable, read_manifest
from rag_posfix.retrieval.index.parts import BM25_ROLES
from rag_posfix.retrieval.index.reader import read_records
from rag_posfix.retrieval.index.vectors import IndexKind
from rag_posfix.retrieval.ingest.ingest import no_documents, read_corpus
from rag_posfix.retrieval.ingest.splitting import PassageSize

__all__ = ["IndexUpdate", "build_index", "update_index"]

_TEXTS_PER_REPORT = 128

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """What became of an index.

    Attributes:
        manifest: Of the index as it is now.
        added: Passages under ids that were not there.
        changed: Passages whose text or metadata is another one.
        unchanged: Passages that are as they were, those of other paths included.
        removed: Passages that are gone.
        embedded: Texts that the embedding model read.
        gone: Documents that are not in the index any more, those whose text changed included.
    """

    manifest: IndexManifest
    added: int
    changed: int
    unchanged: int
    removed: int
    embedded: int
    gone: tuple[Document, ...]


@dataclass(slots=True)
class _Changes:
    """What has to be done to a store: new vectors, new metadata, documents to remove."""

    put: dict[str, Record] = field(default_factory=dict)
    refresh: list[Record] = field(default_factory=list)
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
    """Read files, embed their passages and save them as an index, in the place of one that is there.

    Nothing is written before all passages are embedded; an index that is already in ``folder`` stays usable until
    the new one takes its place.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an index already.
        embeddings: The model to build with.
        progress: Called with (texts embedded, texts in all).
        size: Bounds of a passage; the defaults of PassageSize if None.
        kind: As for ``FaissVectorStore``.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, or writing failed.
    """
    return update_index(
        paths, folder, embeddings, rebuild=True, progress=progress, size=size, kind=kind
    ).manifest  # fmt: skip


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
) -> IndexUpdate:
    """Make an index hold what files hold now; where there is none, build it.

    All files are read; a text that the index has a vector of, under whatever id, is not embedded again. Passages of
    files under ``paths`` that the index knows and that are not found any more are removed. What came from elsewhere
    stays. Whatever the way here, searches find what they find in an index that is built anew from the same files
    (through a graph: up to its approximation). Word statistics are counted anew. The folder is one whole index at
    every moment, the old one or the new one; where nothing changed, nothing is written.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an index already.
        embeddings: The model to build with, which is the one that an existing index was built with.
        rebuild: Take nothing from an index that is there, which may be damaged or of another model, and keep nothing
            of it.
        progress: Called with (texts embedded, texts to embed).
        reading: Called with (files read, files in all).
        size: Bounds of a passage; the defaults of PassageSize if None.
        kind: As for ``FaissVectorStore``.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, an existing index is damaged or of another
            model, an id stands for another document there, no document would be left, or writing failed.
    """
    folder, places = Path(folder), [Path(path) for path in paths]
    check_writable(folder)
    existing = (folder / "manifest.json").exists() and not rebuild
    found = read_corpus(places, size=size, progress=reading)
    if not found and not existing:
        raise no_documents(places)
    before = _readable_documents(folder) if rebuild else {}
    store = (
        FaissVectorStore.load(folder, embeddings, kind=kind) if existing else FaissVectorStore(embeddings, kind=kind)
    )
    manifest = read_manifest(folder) if existing else None
    old = _old_records(store, manifest)
    changes = _compare(old, {str(record.document.id): record for record in found}, places)
    if len(old) + changes.added == len(changes.remove):
        raise no_documents(places)
    embedded = _apply(store, old, changes, progress)
    if manifest is None or changes.put or changes.refresh or changes.remove or BM25_ROLES[0] not in manifest.files:
        _, _, texts = store.table.snapshot()
        manifest = store.save(folder, bm25=BM25Index.build(texts))
    return IndexUpdate(
        manifest=manifest,
        added=changes.added,
        changed=changes.changed,
        unchanged=changes.unchanged,
        removed=len(changes.remove) + len(before.keys() - changes.put.keys()),
        embedded=embedded,
        gone=(*changes.gone, *(document for name, document in before.items() if not _kept(changes.put, document))),
    )


def _kept(records: dict[str, Record], document: Document) -> bool:
    record = records.get(str(document.id))
    return record is not None and searchable_text(record.document) == searchable_text(document)


def _readable_documents(folder: Path) -> dict[str, Document]:
    """Return what an index that is to be replaced holds, as far as it can be read."""
    try:
        return {str(record.document.id): record.document for record in read_records(folder).values()}
    except RetrievalError:
        return {}


def _old_records(store: FaissVectorStore, manifest: IndexManifest | None) -> dict[str, Record]:
    records = list(store.table.records.values())
    if manifest is not None and manifest.version == 1:  # which kept no files, but every document had its source
        records = [Record(r.document, (str(r.document.metadata.get("source", "")),)) for r in records]
    return {str(record.document.id): record for record in records}


def _compare(old: dict[str, Record], found: dict[str, Record], places: Sequence[Path]) -> _Changes:
    """Return what turns ``old`` into what was found in ``places``, and what is elsewhere."""
    changes = _Changes()
    roots = [os.path.abspath(place) for place in places]
    for name, record in found.items():
        before = old.get(name)
        if before is None:
            changes.put[name] = record
            changes.added += 1
            continue
        elsewhere = tuple(file for file in before.files if not _under(file, roots))
        same_text = searchable_text(before.document) == searchable_text(record.document)
        if elsewhere and not same_text:
            raise RetrievalError(
                f"id {name!r} stands for different documents in {record.files[0]} and, as it was indexed before, in "
                f"{elsewhere[0]}; make the ids distinct, or index both files again"
            )
        now = Record(record.document, record.files + tuple(file for file in elsewhere if file not in record.files))
        changed = before.document != now.document
        if not same_text:
            changes.put[name] = now
            changes.gone.append(before.document)
        elif changed or before.files != now.files:
            changes.refresh.append(now)
        changes.changed += changed
        changes.unchanged += not changed
    for name, record in old.items():
        if name in found:
            continue
        left = tuple(file for file in record.files if not _under(file, roots))
        if record.files and not left:
            changes.remove.append(name)
            changes.gone.append(record.document)
            continue
        if left != record.files:
            changes.refresh.append(Record(record.document, left))
        changes.unchanged += 1
    return changes


def _apply(store: FaissVectorStore, old: dict[str, Record], changes: _Changes, progress: Progress | None) -> int:
    """Change the store, and return how many texts had to be embedded."""
    import numpy as np

    texts = {name: searchable_text(record.document) for name, record in changes.put.items()}
    wanted = set(texts.values())
    known = {
        text: name for name, record in old.items() if wanted and (text := searchable_text(record.document)) in wanted
    }
    rows = dict(zip(known, store.vectors_of(list(known.values())), strict=True))
    # Texts of like length share a batch, which spares padding; so do batches not depend on the order of the paths.
    new = sorted(wanted - set(known), key=lambda text: (len(text), text))
    for start in range(0, len(new), _TEXTS_PER_REPORT):
        batch = new[start : start + _TEXTS_PER_REPORT]
        rows.update(zip(batch, store.embed_texts(batch), strict=True))
        if progress is not None:
            progress(start + len(batch), len(new))
    store.delete(changes.remove)
    if changes.refresh:
        store.table.refresh(changes.refresh)  # the vectors stay as they are
    if texts:
        names = sorted(texts, key=lambda name: (len(texts[name]), name))
        store.put_records({name: changes.put[name] for name in names}, np.stack([rows[texts[name]] for name in names]))
    return len(new)


def _under(file: str, roots: Sequence[str]) -> bool:
    place = os.path.abspath(file)
    return any(place == root or place.startswith(root.rstrip(os.sep) + os.sep) for root in roots)
