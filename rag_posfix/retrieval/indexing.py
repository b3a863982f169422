"""Builds an index from files, and updates it incrementally: only new texts are embedded.

Calibrates it by questions that have nothing to do with its passages.

An index folder whose newest version is served: a new version takes the place of the old one at once, or not at all.

A question keeps the version that it began with; the files of an old version are closed with its last question. Knows
neither what searches the index nor who looks for new versions.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import Retriever, SimilarityRange
from rag_posfix.errors import ConfigError, RagPosfixError, RetrievalError
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.documents import IndexEntry, searchable_text
from rag_posfix.retrieval.index.file_formats import BM25_ROLES, BM25Index, IndexKind
from rag_posfix.retrieval.index.storage import (
    EmbeddedTexts,
    IndexManifest,
    check_writable,
    embedded_texts,
    locked,
    read_entries,
    read_manifest,
    read_one_version,
    write_similarity,
)
from rag_posfix.retrieval.ingest.ingest import (
    FileNote,
    FilesRead,
    Paths,
    SkippedFile,
    no_documents,
    path_list,
    read_files,
)
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix.text import content_hash

_TEXTS_PER_STEP = 256
"""Texts that are embedded together and then kept: several batches for each core."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """The result of an update.

    Attributes:
        changed: Number of passages with another text or other metadata.
        unchanged: Number of unchanged passages, passages of other paths included.
        embedded: Number of texts that were embedded.
        removed_documents: Documents that are not in the index any more, former versions of changed texts included.
        continued: Number of texts whose vectors an unfinished update had computed.
        skipped: Files that gave no document of their own.
        notes: What is worth knowing about files that were read.
    """

    manifest: IndexManifest
    added: int
    changed: int
    unchanged: int
    removed: int
    embedded: int
    removed_documents: tuple[Document, ...]
    continued: int = 0
    skipped: tuple[SkippedFile, ...] = ()
    notes: tuple[FileNote, ...] = ()


@dataclass(slots=True)
class _Changes:
    """The changes that an update makes to a store, with the numbers of ``IndexUpdate``."""

    put: dict[str, IndexEntry] = field(default_factory=dict)  # texts whose vectors are needed, by id
    replace: list[IndexEntry] = field(default_factory=list)  # other metadata or files: vectors stay
    remove: list[str] = field(default_factory=list)
    removed_documents: list[Document] = field(default_factory=list)  # by put and remove
    added: int = 0
    changed: int = 0
    unchanged: int = 0


def build_index(
    paths: Paths,
    folder: str | Path,
    embeddings: Embeddings,
    *,
    progress: Progress | None = None,
    size: PassageSize | None = None,
    splitter: BaseDocumentTransformer | None = None,
    fields: Iterable[str] = (),
    kind: IndexKind = "auto",
) -> IndexManifest:
    """Read files, embed their passages and save them as an index, replacing an existing one.

    Nothing is written before all passages are embedded; an existing index in ``folder`` can be used until the new one
    replaces it.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, or writing failed.
    """
    return update_index(
        paths,
        folder,
        embeddings,
        rebuild=True,
        progress=progress,
        size=size,
        splitter=splitter,
        fields=fields,
        kind=kind,
    ).manifest


def update_index(
    paths: Paths,
    folder: str | Path,
    embeddings: Embeddings,
    *,
    rebuild: bool = False,
    progress: Progress | None = None,
    reading: Progress | None = None,
    size: PassageSize | None = None,
    splitter: BaseDocumentTransformer | None = None,
    fields: Iterable[str] = (),
    kind: IndexKind = "auto",
    strict: bool = True,
) -> IndexUpdate:
    """Bring an index up to date with its files; build it if there is none.

    All files are read. A text whose vector is in the index, under any id, is not embedded again. Passages of files
    under ``paths`` that are not found any more are removed; passages of other files stay. Words are counted again.

    Searches then find what they find in an index that is built from the same files (with a graph: up to its
    approximation). The folder is one complete index at every moment, the old one or the new one. If nothing changed,
    nothing is written. Vectors are stored next to the folder as they are computed, so that an update that was stopped
    continues where it was. One process writes an index at a time.

    Args:
        paths: Files and folders, as for ``read_documents``.
        folder: New, empty, or an existing index.
        embeddings: The embedding model; for an existing index, the model that it was built with.
        rebuild: Replace an existing index, which may be damaged or of another model, without reusing its vectors or
            keeping its other passages.
        reading: Called with (files read, files to read).
        size: As for ``read_documents``; so are ``splitter`` and ``fields``.
        kind: As for ``FaissVectorStore``.
        strict: Raise at the first file or record that cannot be read; otherwise leave it out. What an existing index
            holds of an unreadable file stays.

    Raises:
        RetrievalError: the files cannot be read, the folder cannot be used, another process is writing the index, an
            existing index is damaged or of another model, an id belongs to another document there, no document would
            be left, or writing failed.
    """
    folder, sources = Path(folder), path_list(paths)
    check_writable(folder)
    with locked(folder):
        read = read_files(sources, size=size, splitter=splitter, fields=fields, strict=strict, progress=reading)
        return _update(folder, sources, read, embeddings, rebuild, progress, kind)


def _update(
    folder: Path,
    sources: Sequence[Path],
    read: FilesRead,
    embeddings: Embeddings,
    rebuild: bool,
    progress: Progress | None,
    kind: IndexKind,
) -> IndexUpdate:
    existing = (folder / "manifest.json").exists() and not rebuild
    if not read.entries and not existing:
        raise no_documents(sources, read.skipped)
    replaced: dict[str, Document] = {}
    with suppress(RetrievalError):  # an index that is replaced may be unreadable
        if rebuild:
            replaced = {str(entry.document.id): entry.document for entry in read_entries(folder).values()}
    store = (
        FaissVectorStore.load(folder, embeddings, kind=kind) if existing else FaissVectorStore(embeddings, kind=kind)
    )
    manifest = read_manifest(folder) if existing else None
    old = {str(entry.document.id): entry for entry in store.table.entries.values()}
    unreadable = {skipped.file for skipped in read.skipped if skipped.kind == "unreadable"}
    changes = _compare(old, {str(entry.document.id): entry for entry in read.entries}, sources, unreadable)
    if len(old) + changes.added == len(changes.remove):
        raise no_documents(sources, read.skipped)
    with embedded_texts(folder, embedding_identity(embeddings)) as cached:
        embedded, continued = _apply(store, old, changes, cached, progress)
        if manifest is None or changes.put or changes.replace or changes.remove or BM25_ROLES[0] not in manifest.files:
            _, _, texts = store.table.snapshot()
            manifest = store.save(folder, bm25=BM25Index.build(texts))
    new_texts = {(name, searchable_text(entry.document)) for name, entry in changes.put.items()}
    invalid = (doc for name, doc in replaced.items() if (name, searchable_text(doc)) not in new_texts)
    return IndexUpdate(
        manifest=manifest,
        added=changes.added,
        changed=changes.changed,
        unchanged=changes.unchanged,
        removed=len(changes.remove) + len(replaced.keys() - changes.put.keys()),
        embedded=embedded,
        removed_documents=(*changes.removed_documents, *invalid),
        continued=continued,
        skipped=read.skipped,
        notes=read.notes,
    )


def _compare(
    old: dict[str, IndexEntry], new: dict[str, IndexEntry], sources: Sequence[Path], unreadable: set[str]
) -> _Changes:
    """Return the changes from ``old`` to the documents of ``sources``; documents of ``old`` from other files stay."""
    changes = _Changes()
    roots = [os.path.abspath(source) for source in sources]
    unread = {os.path.abspath(file) for file in unreadable}

    def is_unread(path: Path) -> bool:
        return bool(unread) and not unread.isdisjoint(map(str, (path, *path.parents)))  # folders can be unreadable too

    def remaining_files(entry: IndexEntry) -> tuple[str, ...]:
        """Return the files of an entry that are elsewhere, or could not be read now."""
        paths = [(file, os.path.abspath(file)) for file in entry.files]
        under = {p for _, p in paths for root in roots if p == root or p.startswith(root.rstrip(os.sep) + os.sep)}
        return tuple(file for file, path in paths if path not in under or is_unread(Path(path)))

    for name, entry in new.items():
        before = old.get(name)
        if before is None:
            changes.put[name] = entry
            changes.added += 1
            continue
        other_files = remaining_files(before)
        same_text = searchable_text(before.document) == searchable_text(entry.document)
        if other_files and not same_text:
            raise RetrievalError(
                f"id {name!r} belongs to different documents in {entry.files[0]} and, from an earlier indexing, in "
                f"{other_files[0]}; make the ids distinct, or index both files again"
            )
        after = IndexEntry(
            entry.document, entry.files + tuple(file for file in other_files if file not in entry.files)
        )
        changed = before.document != after.document
        if not same_text:
            changes.put[name] = after
            changes.removed_documents.append(before.document)
        elif changed or before.files != after.files:
            changes.replace.append(after)
        changes.changed += changed
        changes.unchanged += not changed
    for name, entry in old.items():
        if name in new:
            continue
        other_files = remaining_files(entry)
        if entry.files and not other_files:
            changes.remove.append(name)
            changes.removed_documents.append(entry.document)
            continue
        if other_files != entry.files:
            changes.replace.append(IndexEntry(entry.document, other_files))
        changes.unchanged += 1
    return changes


def _apply(
    store: FaissVectorStore,
    old: dict[str, IndexEntry],
    changes: _Changes,
    cached: EmbeddedTexts | None,
    progress: Progress | None,
) -> tuple[int, int]:
    """Apply the changes to the store; return the numbers of texts that were embedded now, and by an unfinished run."""
    import numpy as np

    texts = {name: searchable_text(entry.document) for name, entry in changes.put.items()}
    needed = set(texts.values())
    stored = {searchable_text(entry.document): name for name, entry in old.items()} if needed else {}
    names = {text: name for text, name in stored.items() if text in needed}
    rows = dict(zip(names, store.vectors_of(list(names.values())), strict=True))
    # Sorted by length, so that the texts of a batch need little padding; by content, so that batches do not depend on
    # the order of the paths.
    new = sorted(needed - set(names), key=lambda text: (len(text), text))
    continued = {} if cached is None else cached.get(new)
    rows.update(continued)
    remaining = [text for text in new if text not in continued]
    for start in range(0, len(remaining), _TEXTS_PER_STEP):
        batch = remaining[start : start + _TEXTS_PER_STEP]
        vectors = store.embed_texts(batch)
        if cached is not None:
            cached.put(batch, vectors)
        rows.update(zip(batch, vectors, strict=True))
        if progress is not None:
            progress(len(continued) + start + len(batch), len(new))
    store.delete(changes.remove)
    if changes.replace:
        store.table.replace(changes.replace)
    if texts:
        order = sorted(texts, key=lambda name: (len(texts[name]), name))
        store.put_entries({name: changes.put[name] for name in order}, np.stack([rows[texts[name]] for name in order]))
    return len(remaining), len(continued)


FOREIGN_QUESTIONS = (
    "good evening", "What time is it?", "How are you today?", "Can you help me with my homework?", "ok great",
    "Who discovered America?", "What is the tallest mountain in the world?", "How do I bake a chocolate cake?",
    "What is the currency of Mexico?", "How many bones does a human body have?", "When did the second world war end?",
    "What is the fastest animal on land?", "Who wrote Don Quixote?", "How do I tie a tie?", "What causes earthquakes?",
    "What is the meaning of life?", "Recommend me a film for tonight.", "How do I learn to play the guitar?",
    "What is the boiling point of water?", "Who was the first person in space?", "Write a short story about a dragon.",
    "How do I remove a coffee stain?", "What is a black hole?", "Which language is spoken in Egypt?",
    "How do I sort a list in Java?", "What is seven times eight?", "Who invented the telephone?",
    "What should I name my cat?", "How do plants drink?", "What is the largest ocean?",
    "Is it going to rain tomorrow?", "How long do elephants live?", "Was ist die Hauptstadt von Kanada?",
    "Wie koche ich Reis?",
    "Quelle est la distance de la terre au soleil ?", "Raconte-moi une blague.", "¿Quién pintó el Guernica?",
    "¿Cómo se hace una tortilla?",
)  # fmt: skip
"""Questions of general knowledge, requests and greetings: few indexes answer more than a few of them.

In scripts of spaced words: to embedding models that cannot read a script, all texts in it are alike.
"""


def calibrate_index(
    folder: str | Path, embeddings: Embeddings, questions: Sequence[str] = FOREIGN_QUESTIONS
) -> SimilarityRange:
    """Measure the best similarities of foreign questions in an index, and keep a range of them in its manifest.

    Formula: b_i is the similarity of question i to its best passage. low is the 25 % quantile of b; clear =
        2 q - median(b), at most 1, where q is the 95 % quantile. If the index answers more than a twentieth of the
        questions, ``clear`` rises, and more is left to the judge.

    Args:
        embeddings: The model that the index was built with.
        questions: At least ten questions that the index does not answer.

    Raises:
        ConfigError: fewer than ten questions.
        RetrievalError: the index is missing, damaged or of another model, or cannot be written.
    """
    if len(questions) < 10:
        raise ConfigError(f"{len(questions)} foreign questions are given; at least 10 are needed")
    store = FaissVectorStore.load(folder, embeddings)
    best = [
        max((score for _, score in store.similarity_search_with_score(text, k=1)), default=0.0) for text in questions
    ]
    twentieths = statistics.quantiles(best, n=20, method="inclusive")  # 5 %, 10 %, ...
    low = round(min(max(twentieths[4], 0.0), 1.0), 3)
    clear = round(min(max(2 * twentieths[18] - twentieths[9], low), 1.0), 3)
    similarity = SimilarityRange(low, clear)
    write_similarity(Path(folder), similarity)
    return similarity


_log = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
"""After this time a version that could not be read is read again, even if no file has changed."""


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """A version of an index that was read completely.

    Attributes:
        retriever: Searches this version.
    """

    retriever: Retriever
    manifest: IndexManifest

    @property
    def name(self) -> str:
        """A hash of the manifest, which has the hashes of all files."""
        return content_hash(self.manifest.model_dump_json())[:12]


class FollowedIndex:
    """A retriever that searches the newest version of an index folder. Safe to share between threads.

    Args:
        load: Reads the folder and returns a retriever; it is called again for each new version.

    Raises:
        RagPosfixError: the folder cannot be read, the errors of ``load``.
    """

    def __init__(self, folder: Path, load: Callable[[], Retriever]) -> None:
        self._folder, self._load = folder, load
        self._lock = threading.Lock()
        self._files = _list_files(folder)
        self._retry_at = math.inf
        self.version = self._read(None)
        """The version that new questions search."""
        self.failure: str | None = None
        """Why the version in the folder is not served, or None if it is."""
        self.failing_since = datetime.now(UTC)
        """When the first failure was since a version could be read."""

    @property
    def current_retriever(self) -> Retriever:
        """The retriever of the version that is served now, which ``contracts.retrieval.current_of`` returns."""
        return self.version.retriever

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents of the version that is served now."""
        return self.version.retriever.retrieve(question, k)

    def reload(self, *, force: bool = True) -> bool:
        """Serve the version in the folder; return whether it was not served before.

        If it cannot be read, ``failure`` says why, and the version before is served. One thread reads at a time.

        Args:
            force: Also if the files are those of the last call. Otherwise the call then costs one ``stat`` per file.
        """
        with self._lock:
            files = _list_files(self._folder)
            if not force and files == self._files and time.monotonic() < self._retry_at:
                return False
            self._files = files
            before = self.version
            try:
                version = self._read(before)
            except Exception as error:  # whatever it is: the version before can be served
                known = isinstance(error, RagPosfixError)
                self.failing_since = self.failing_since if self.failure else datetime.now(UTC)
                self.failure = str(error) if known else f"{type(error).__name__}: {error}"
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                _log.error(
                    "the new version of index %s is not served, version %s of %d passages is: %s",
                    self._folder, before.name, before.manifest.count, self.failure, exc_info=None if known else error,
                )  # fmt: skip
                return False
            self.failure, self._retry_at = None, math.inf
            if version is before:
                return False
            self.version = version
            _log.info(
                "serving version %s of index %s, %d passages", version.name, self._folder, version.manifest.count
            )
            return True

    def _read(self, served: IndexVersion | None) -> IndexVersion:
        """Return the version in the folder, of which all files were read; ``served`` if it is that."""
        if served is not None and read_manifest(self._folder) == served.manifest:
            return served
        return IndexVersion(*read_one_version(self._folder, self._load))


def _list_files(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, inode, size and time of change of each file; none for a folder that cannot be read now."""
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
