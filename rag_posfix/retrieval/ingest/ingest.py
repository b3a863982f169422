"""Reads documents from files and folders: text is split into passages, each JSON line is one document.

The result depends only on the files' content and the order of the paths: folders are read in sorted order, and ids
are given in the file or hashed from the content. Knows nothing of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, NotTextError, RetrievalError
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.ingest.found_files import SUFFIXES, files_of
from rag_posfix.retrieval.ingest.json_lines import JSON_LINES_SUFFIXES, read_json_lines
from rag_posfix.retrieval.ingest.readers import read_text
from rag_posfix.retrieval.ingest.skipped import SkippedFile, SkippedKind
from rag_posfix.retrieval.ingest.splitting import PassageSize, split_passages
from rag_posfix.retrieval.ingest.tables import TABLE_SUFFIXES, read_csv
from rag_posfix.text import clean_text, content_hash

__all__ = ["FilesRead", "no_documents", "read_documents", "read_files"]


@dataclass(frozen=True, slots=True)
class _Found:
    """A document, its first location for error messages, and all files that contain it."""

    document: Document
    place: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The result of reading files.

    Attributes:
        entries: The documents, each with all files that contain it.
        skipped: The files that gave no document of their own.
    """

    entries: tuple[IndexEntry, ...]
    skipped: tuple[SkippedFile, ...]


def read_documents(paths: Iterable[str | Path], *, size: PassageSize | None = None) -> list[Document]:
    """Return the documents of files and folders, each with an id and ``metadata["source"]``.

    Text files (``.txt``, ``.md``, ``.html``, ``.htm``, ``.pdf``, ``.docx``) are split into passages with ``start``
    and ``end`` in the metadata: ``readers.read_text(file).text[start:end]`` is the passage. Passages of HTML pages
    have the page's ``title``, those of PDF files the ``page`` on which they begin. A line of a ``.jsonl`` or
    ``.jsonl.gz`` file is one document: ``text`` (or ``page_content``, ``contents``) and optionally ``id`` (or
    ``_id``), ``title`` and ``metadata``; so is a row of a ``.csv`` file (``tables.read_csv``). In a folder in
    BEIR's layout only the corpus is read. A document without an id gets a hash of its title and text. A document
    that occurs several times with the same id and content is returned once. Undecodable bytes are replaced, and
    documents without text are left out, both with a warning in the log.

    Args:
        paths: Files, or folders that are searched for such files; hidden files are skipped.
        size: Limits of a passage; the defaults of PassageSize if None.

    Raises:
        RetrievalError: a path is missing or unreadable, a suffix is not supported, a file is binary, a line is
            malformed, one id belongs to different contents, or there is no document at all.
        ConfigError: there is a PDF or Word file, and the extra ``pdf`` or ``docx`` is not installed.
    """
    places = [Path(path) for path in paths]
    found = read_files(places, size=size).entries
    if not found:
        raise no_documents(places)
    return [entry.document for entry in found]


def read_files(
    paths: Iterable[str | Path],
    *,
    size: PassageSize | None = None,
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> FilesRead:
    """Return the documents of files and folders, each with all files that contain it; otherwise as ``read_documents``.

    Args:
        paths: As for ``read_documents``.
        size: As for ``read_documents``.
        strict: Raise at the first file that cannot be read. Otherwise the file is skipped as a whole, and the others
            are read.
        progress: Called with (files read, files to read).

    Raises:
        RetrievalError: a path is missing; with ``strict``, as ``read_documents``. Without any document, the result is
            empty.
        ConfigError: with ``strict``, as ``read_documents``.
    """
    skipped: list[SkippedFile] = []
    files = [file for path in paths for file in files_of(Path(path), skipped.append, strict=strict)]
    found: dict[str, _Found] = {}
    for number, file in enumerate(files, start=1):
        try:
            why = _take(file, size, found)
        except (RetrievalError, ConfigError) as error:
            if strict:
                raise
            why = SkippedFile(str(file), "binary" if isinstance(error, NotTextError) else "unreadable", str(error))
        if why is not None:
            skipped.append(why)
        if progress is not None:
            progress(number, len(files))
    return FilesRead(tuple(IndexEntry(item.document, item.files) for item in found.values()), tuple(skipped))


def _take(file: Path, size: PassageSize | None, found: dict[str, _Found]) -> SkippedFile | None:
    """Add the documents of a file to ``found``, all or none; return why the file has none of its own, if so."""
    name = clean_text(str(file))
    try:
        items = [_Found(document, place, (name,)) for document, place in _read_file(file, size)]
    except OSError as error:
        raise RetrievalError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    if not items:
        return _skipped(file, "empty", "no text in it")
    known = [found.get(str(item.document.id)) for item in items]
    changes: dict[str, _Found] = {}
    for item in items:
        document_id = str(item.document.id)
        changes[document_id] = _merged(changes.get(document_id) or found.get(document_id), item)
    found.update(changes)
    others = {one.files[0] for one in known if one is not None}
    if None not in known and others != {name}:
        return _skipped(file, "duplicate", f"duplicate of {', '.join(sorted(others))}")
    return None


def _skipped(file: Path, kind: SkippedKind, reason: str) -> SkippedFile:
    return SkippedFile(str(file), kind, reason)


def no_documents(paths: Iterable[Path], skipped: Sequence[SkippedFile] = ()) -> RetrievalError:
    """Return the error for paths without any document.

    Args:
        skipped: The files that were skipped; the first of them is told.
    """
    names = ", ".join(repr(str(path)) for path in paths) or "no path"
    told = f" ({len(skipped)} skipped, the first: {skipped[0].file!r}: {skipped[0].reason})" if skipped else ""
    return RetrievalError(f"no documents in {names}{told}; give files with text, ending in {', '.join(SUFFIXES)}")


def _merged(first: _Found | None, item: _Found) -> _Found:
    """Return a document with the files of both."""
    if first is None:
        return item
    if _content(first.document) != _content(item.document):
        raise RetrievalError(
            f"id {str(item.document.id)!r} belongs to different documents in {first.place} and {item.place}; make the "
            "ids distinct"
        )
    if item.files[0] in first.files:
        return first
    return _Found(first.document, first.place, first.files + item.files)


def _content(document: Document) -> tuple[str, str]:
    return str(document.metadata.get("title", "")), document.page_content


def _read_file(file: Path, size: PassageSize | None) -> Iterator[tuple[Document, str]]:
    if file.name.lower().endswith(JSON_LINES_SUFFIXES):
        return read_json_lines(file)
    if file.name.lower().endswith(TABLE_SUFFIXES):
        return read_csv(file)
    return _read_passages(file, size)


def _read_passages(file: Path, size: PassageSize | None) -> Iterator[tuple[Document, str]]:
    read = read_text(file)
    source = clean_text(str(file))
    for span in split_passages(read.text, size):
        passage = read.text[span.start : span.end]
        metadata: dict[str, Any] = {"source": source, "start": span.start, "end": span.end}
        if read.title:
            metadata["title"] = read.title
        page = read.page_at(span.start)
        if page is not None:
            metadata["page"] = page
        document = Document(id=content_hash(read.title, passage), page_content=passage, metadata=metadata)
        yield document, f"{source} (characters {span.start} to {span.end})"
