"""Reads documents from files and folders: text is split into passages, each JSON line is one document.

The result depends only on the files' content and the order of the paths: folders are read in sorted order, and ids
are given in the file or hashed from the content. Knows nothing of embeddings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.ingest.json_lines import JSON_LINES_SUFFIXES, read_json_lines
from rag_posfix.retrieval.ingest.readers import TEXT_SUFFIXES, read_text
from rag_posfix.retrieval.ingest.splitting import PassageSize, split_passages
from rag_posfix.text import clean_text, content_hash

__all__ = ["SUFFIXES", "no_documents", "read_documents", "read_entries_of_files"]

logger = logging.getLogger(__name__)

SUFFIXES = tuple(sorted((*JSON_LINES_SUFFIXES, *TEXT_SUFFIXES)))
"""Suffixes of files that can be read, in upper or lower case."""

_BEIR_CORPORA = ("corpus.jsonl", "corpus.jsonl.gz")
_BEIR_QUESTIONS = ("queries.jsonl", "queries.jsonl.gz", "qrels")


@dataclass(frozen=True, slots=True)
class _Found:
    """A document, its first location for error messages, and all files that contain it."""

    document: Document
    place: str
    files: tuple[str, ...]


def read_documents(paths: Iterable[str | Path], *, size: PassageSize | None = None) -> list[Document]:
    """Return the documents of files and folders, each with an id and ``metadata["source"]``.

    Text files (``.txt``, ``.md``, ``.html``, ``.htm``, ``.pdf``) are split into passages with ``start`` and ``end`` in
    the metadata: ``readers.read_text(file).text[start:end]`` is the passage. Passages of HTML pages have the page's
    ``title``, those of PDF files the ``page`` on which they begin. A line of a ``.jsonl`` or ``.jsonl.gz`` file is one
    document: ``text`` (or ``page_content``, ``contents``) and optionally ``id`` (or ``_id``), ``title`` and
    ``metadata``. In a folder in BEIR's layout only the corpus is read. A document without an id gets a hash of its
    title and text. A document that occurs several times with the same id and content is returned once. Undecodable
    bytes are replaced, and documents without text are left out, both with a warning in the log.

    Args:
        paths: Files, or folders that are searched for such files; hidden files are skipped.
        size: Limits of a passage; the defaults of PassageSize if None.

    Raises:
        RetrievalError: a path is missing or unreadable, a suffix is not supported, a line is malformed, one id
            belongs to different contents, or there is no document at all.
        ConfigError: there is a PDF file, and the extra ``pdf`` is not installed.
    """
    places = [Path(path) for path in paths]
    found = read_entries_of_files(places, size=size)
    if not found:
        raise no_documents(places)
    return [entry.document for entry in found]


def read_entries_of_files(
    paths: Iterable[str | Path],
    *,
    size: PassageSize | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[IndexEntry]:
    """Return the documents of files and folders, each with all files that contain it; otherwise as ``read_documents``.

    Args:
        paths: As for ``read_documents``.
        size: As for ``read_documents``.
        progress: Called with (files read, files to read).

    Raises:
        RetrievalError: as ``read_documents``; but without any document, the result is an empty list.
        ConfigError: as ``read_documents``.
    """
    files = [file for path in paths for file in _files(Path(path))]
    found: dict[str, _Found] = {}
    for number, file in enumerate(files, start=1):
        try:
            for document, place in _read_file(file, size):
                _add(found, _Found(document, place, (clean_text(str(file)),)))
        except OSError as error:
            raise RetrievalError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
        if progress is not None:
            progress(number, len(files))
    return [IndexEntry(item.document, item.files) for item in found.values()]


def no_documents(paths: Iterable[Path]) -> RetrievalError:
    """Return the error for paths without any document."""
    names = ", ".join(repr(str(path)) for path in paths) or "no path"
    return RetrievalError(f"no documents in {names}; give files with text, ending in {', '.join(SUFFIXES)}")


def _add(found: dict[str, _Found], item: _Found) -> None:
    name = str(item.document.id)
    first = found.setdefault(name, item)
    if _content(first.document) != _content(item.document):
        raise RetrievalError(
            f"id {name!r} belongs to different documents in {first.place} and {item.place}; make the ids distinct"
        )
    if item.files[0] not in first.files:
        found[name] = _Found(first.document, first.place, first.files + item.files)


def _content(document: Document) -> tuple[str, str]:
    return str(document.metadata.get("title", "")), document.page_content


def _supported(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a path, in an order that does not depend on the file system."""
    if path.is_dir():
        yield from _walk(path)
    elif not path.exists():
        raise RetrievalError(f"no such file or folder: {str(path)!r}")
    elif not path.is_file():
        raise RetrievalError(
            f"{str(path)!r} is neither a file nor a folder; give files ending in {', '.join(SUFFIXES)}"
        )
    elif not _supported(path):
        raise RetrievalError(f"cannot read {str(path)!r}: suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}")
    else:
        yield path


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise RetrievalError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        corpus = next((name for name in _BEIR_CORPORA if name in names), None)
        if corpus is not None and any(name in names or name in folders for name in _BEIR_QUESTIONS):
            folders[:], names = [], [corpus]  # leave out queries and judgements
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    for file in sorted(files, key=lambda file: file.relative_to(folder).parts):
        if _supported(file) and file.is_file():
            yield file
        else:
            logger.debug("skipped %s: not one of %s", file, ", ".join(SUFFIXES))


def _read_file(file: Path, size: PassageSize | None) -> Iterator[tuple[Document, str]]:
    if file.name.lower().endswith(JSON_LINES_SUFFIXES):
        return read_json_lines(file)
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
