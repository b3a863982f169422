"""Reads documents from files and folders: text is split into passages, a JSON line or table row is one document.

The result depends only on the files' content and the order of the paths: folders are read in sorted order, and ids
are given in the file or hashed from the content. Knows nothing of embeddings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, NotTextError, RetrievalError
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.ingest.readers import TEXT_SUFFIXES, read_text
from rag_posfix.retrieval.ingest.records import JSON_LINES_SUFFIXES, TABLE_SUFFIXES, read_csv, read_json_lines
from rag_posfix.text import clean_text, content_hash

__all__ = ["read_documents"]

SUFFIXES = tuple(sorted((*JSON_LINES_SUFFIXES, *TABLE_SUFFIXES, *TEXT_SUFFIXES)))
"""Suffixes of files that can be read, in upper or lower case."""

_BEIR_CORPORA = ("corpus.jsonl", "corpus.jsonl.gz")
_BEIR_QUESTIONS = ("queries.jsonl", "queries.jsonl.gz", "qrels")

SkippedKind: TypeAlias = Literal["unsupported", "empty", "binary", "duplicate", "unreadable"]
"""Why a file gave no document of its own: type, no text, no text file, content of another file, or an error."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that gave no document of its own, by its path, and the reason on one line."""

    file: str
    kind: SkippedKind
    reason: str


@dataclass(frozen=True, slots=True)
class _ReadDocument:
    """A document, its first position for error messages, and all files that contain it."""

    document: Document
    position: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The documents of files, each with all files that contain it, and the files without a document of their own."""

    entries: tuple[IndexEntry, ...]
    skipped: tuple[SkippedFile, ...]


@dataclass(frozen=True, slots=True)
class CharSpan:
    """Characters ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PassageSize:
    """Upper limits of a passage's length.

    Args:
        words: Maximum number of words; about 150 fit into the 256 tokens that small embedding models read.
        characters: Maximum number of characters, for text whose words are long or not separated by spaces.

    Raises:
        ConfigError: a value is below 1.
    """

    words: int = 150
    characters: int = 1000

    def __post_init__(self) -> None:
        for name, value in (("words", self.words), ("characters", self.characters)):
            if value < 1:
                raise ConfigError(f"passage size: {name}={value} must be >= 1")


def read_documents(paths: Iterable[str | Path], *, size: PassageSize | None = None) -> list[Document]:
    """Return the documents of files and folders, each with an id and ``metadata["source"]``.

    Text files (``.txt``, ``.md``, ``.html``, ``.htm``, ``.pdf``, ``.docx``) are split into passages with ``start``
    and ``end`` in the metadata: ``readers.read_text(file).text[start:end]`` is the passage. Passages of HTML pages
    have the page's ``title``, those of PDF files the ``page`` on which they begin. A line of a ``.jsonl`` or
    ``.jsonl.gz`` file is one document: ``text`` (or ``page_content``, ``contents``) and optionally ``id`` (or
    ``_id``), ``title`` and ``metadata``; so is a row of a ``.csv`` file (``records.read_csv``). In a folder in
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
    files = [Path(path) for path in paths]
    entries = read_files(files, size=size).entries
    if not entries:
        raise no_documents(files)
    return [entry.document for entry in entries]


def read_files(
    paths: Iterable[str | Path],
    *,
    size: PassageSize | None = None,
    strict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> FilesRead:
    """Return the documents of files and folders, each with all files that contain it; otherwise as ``read_documents``.

    Args:
        strict: Raise at the first file that cannot be read. Otherwise the file is skipped as a whole, and the others
            are read.
        progress: Called with (files read, files to read).

    Raises:
        RetrievalError: a path is missing; with ``strict``, as ``read_documents``. Without any document, the result is
            empty.
        ConfigError: with ``strict``, as ``read_documents``.
    """
    skipped: list[SkippedFile] = []
    files = [file for path in paths for file in _files_of(Path(path), skipped.append, strict=strict)]
    documents: dict[str, _ReadDocument] = {}
    for number, file in enumerate(files, start=1):
        try:
            reason = _add_file(file, size, documents)
        except (RetrievalError, ConfigError) as error:
            if strict:
                raise
            reason = SkippedFile(str(file), "binary" if isinstance(error, NotTextError) else "unreadable", str(error))
        if reason is not None:
            skipped.append(reason)
        if progress is not None:
            progress(number, len(files))
    return FilesRead(tuple(IndexEntry(item.document, item.files) for item in documents.values()), tuple(skipped))


def no_documents(paths: Iterable[Path], skipped: Sequence[SkippedFile] = ()) -> RetrievalError:
    """Return the error for paths without any document; it names the first of the skipped files."""
    names = ", ".join(repr(str(path)) for path in paths) or "no path"
    first = f" ({len(skipped)} skipped, the first: {skipped[0].file!r}: {skipped[0].reason})" if skipped else ""
    return RetrievalError(f"no documents in {names}{first}; give files with text, ending in {', '.join(SUFFIXES)}")


def _files_of(path: Path, skip: Callable[[SkippedFile], None], *, strict: bool) -> Iterator[Path]:
    """Yield the files of a path that can be read; hidden files are left out silently, others go to ``skip``."""
    if path.is_dir():
        yield from _walk(path, skip, strict)
    elif not path.exists():
        raise RetrievalError(f"no such file or folder: {str(path)!r}")
    elif not path.is_file():
        raise RetrievalError(
            f"{str(path)!r} is neither a file nor a folder; give files ending in {', '.join(SUFFIXES)}"
        )
    elif path.name.lower().endswith(SUFFIXES):
        yield path
    elif strict:
        raise RetrievalError(f"cannot read {str(path)!r}: {_unsupported(path)}")
    else:
        skip(SkippedFile(str(path), "unsupported", _unsupported(path)))


def _unsupported(path: Path) -> str:
    return f"suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}"


def _walk(folder: Path, skip: Callable[[SkippedFile], None], strict: bool) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        if strict:
            raise RetrievalError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error
        skip(SkippedFile(str(error.filename), "unreadable", str(error.strerror or error)))

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        corpus = next((name for name in _BEIR_CORPORA if name in names), None)
        if corpus is not None and any(name in names or name in folders for name in _BEIR_QUESTIONS):
            folders[:], names = [], [corpus]  # leave out queries and judgements
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    for file in sorted(files, key=lambda file: file.relative_to(folder).parts):
        if not file.name.lower().endswith(SUFFIXES):
            skip(SkippedFile(str(file), "unsupported", _unsupported(file)))
        elif file.is_file():
            yield file
        else:
            skip(SkippedFile(str(file), "unreadable", "not a regular file, or a link to a file that is missing"))


def _add_file(file: Path, size: PassageSize | None, documents: dict[str, _ReadDocument]) -> SkippedFile | None:
    """Add all documents of a file, or none; return the reason if the file has no document of its own."""
    name, suffix = clean_text(str(file)), file.name.lower()
    if suffix.endswith(JSON_LINES_SUFFIXES):
        records = read_json_lines(file)
    elif suffix.endswith(TABLE_SUFFIXES):
        records = read_csv(file)
    else:
        records = _read_passages(file, name, size)
    try:
        items = [_ReadDocument(document, position, (name,)) for document, position in records]
    except OSError as error:
        raise RetrievalError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    if not items:
        return SkippedFile(str(file), "empty", "no text in it")
    earlier = [documents.get(str(item.document.id)) for item in items]
    changes: dict[str, _ReadDocument] = {}
    for item in items:
        document_id = str(item.document.id)
        changes[document_id] = _merged(changes.get(document_id) or documents.get(document_id), item)
    documents.update(changes)
    originals = {item.files[0] for item in earlier if item is not None}
    if None not in earlier and originals != {name}:
        return SkippedFile(str(file), "duplicate", f"duplicate of {', '.join(sorted(originals))}")
    return None


def _merged(first: _ReadDocument | None, item: _ReadDocument) -> _ReadDocument:
    """Return a document with the files of both."""
    if first is None:
        return item
    old, new = first.document, item.document
    contents = {(str(document.metadata.get("title", "")), document.page_content) for document in (old, new)}
    if len(contents) > 1:
        raise RetrievalError(
            f"id {str(new.id)!r} belongs to different documents in {first.position} and {item.position}; make the ids "
            "distinct"
        )
    if item.files[0] in first.files:
        return first
    return _ReadDocument(old, first.position, first.files + item.files)


def _read_passages(file: Path, source: str, size: PassageSize | None) -> Iterator[tuple[Document, str]]:
    read = read_text(file)
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


# Tried in turn on a span that is too long: breaks between paragraphs, then sentences and lines, then words.
_BREAKS = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"(?<=[.!?…])[\"')\]”’»]*\s+|(?<=[。！？])\s*|\n\s*"),  # noqa: RUF001 - CJK and typographic marks
    re.compile(r"\s+"),
)


def split_passages(text: str, size: PassageSize | None = None) -> list[CharSpan]:
    """Return the passages of ``text``, in order, with exact character offsets.

    Consecutive paragraphs are joined while they fit; a paragraph that does not fit is split between sentences, then
    between words, then anywhere. Passages do not overlap and start and end with a visible character. Only white space
    is left out.
    """
    size = size or PassageSize()
    passages: list[CharSpan] = []
    words_so_far = 0
    for span in _split(text, CharSpan(0, len(text)), size, 0):
        words = len(text[span.start : span.end].split())
        last = passages[-1] if passages else None
        if last and words_so_far + words <= size.words and span.end - last.start <= size.characters:
            passages[-1] = CharSpan(last.start, span.end)
            words_so_far += words
        else:
            passages.append(span)
            words_so_far = words
    return passages


def _split(text: str, span: CharSpan, size: PassageSize, level: int) -> Iterator[CharSpan]:
    """Yield consecutive segments of ``span`` that fit, as large as the breaks allow."""
    start, end = span.start, span.end
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    if start == end:
        return
    if end - start <= size.characters and len(text[start:end].split()) <= size.words:
        yield CharSpan(start, end)
    elif level == len(_BREAKS):
        for offset in range(start, end, size.characters):
            yield CharSpan(offset, min(offset + size.characters, end))
    else:
        for match in _BREAKS[level].finditer(text, start, end):
            yield from _split(text, CharSpan(start, match.end()), size, level + 1)
            start = match.end()
        yield from _split(text, CharSpan(start, end), size, level + 1)
