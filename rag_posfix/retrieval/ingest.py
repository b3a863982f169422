"""Files to documents: text is split into passages, JSON lines are taken as they are.

The result depends only on the files' content and the order of the paths: folders are read in sorted order and ids
come from the file or from the content. Knows nothing of embeddings or indexes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.records import parse_json
from rag_posfix.retrieval.splitting import PassageSize, split_passages
from rag_posfix.text import clean_text, content_hash

__all__ = ["SUFFIXES", "read_documents"]

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".md", ".txt")
"""What a file name may end with, in any case."""

_ID_FIELDS = ("id", "_id")
_TEXT_FIELDS = ("text", "page_content", "contents")


@dataclass(frozen=True, slots=True)
class _Found:
    """A document and where it was found, for error messages."""

    document: Document
    place: str


def read_documents(paths: Iterable[str | Path], *, size: PassageSize | None = None) -> list[Document]:
    """Return the documents of files and folders, each with an id and ``metadata["source"]``.

    ``.txt`` and ``.md`` files are split into passages with ``start`` and ``end`` (characters of the decoded file)
    in the metadata. A line of a ``.jsonl`` file is one document: ``text`` (or ``page_content``, ``contents``) and
    optionally ``id`` (or ``_id``), ``title`` and ``metadata``. A document without an id gets a hash of its title
    and text. Documents that repeat an id with equal content are read once. Bytes that are not UTF-8 are replaced,
    with a warning in the log; so are documents without text left out.

    Args:
        paths: Files, or folders that are searched for such files; hidden ones are skipped.
        size: Bounds of a passage; the defaults of PassageSize if None.

    Raises:
        RetrievalError: a path is missing or unreadable, a suffix is not supported, a line is malformed, one id
            stands for different contents, or there is no document at all.
    """
    places = [Path(path) for path in paths]
    found: dict[str, _Found] = {}
    for file in (file for place in places for file in _files(place)):
        try:
            for item in _read_file(file, size):
                _add(found, item)
        except OSError as error:
            raise RetrievalError(f"cannot read {str(file)!r}: {error.strerror or error}") from error
    if not found:
        names = ", ".join(repr(str(place)) for place in places) or "no path"
        raise RetrievalError(f"no documents in {names}; give files with text, ending in {', '.join(SUFFIXES)}")
    return [item.document for item in found.values()]


def _add(found: dict[str, _Found], item: _Found) -> None:
    name = str(item.document.id)
    first = found.setdefault(name, item)
    if _content(first.document) != _content(item.document):
        raise RetrievalError(
            f"id {name!r} stands for different documents in {first.place} and {item.place}; make the ids distinct"
        )


def _content(document: Document) -> tuple[str, str]:
    return str(document.metadata.get("title", "")), document.page_content


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that ``path`` stands for, in an order that does not depend on the file system."""
    if path.is_dir():
        yield from _walk(path)
    elif not path.exists():
        raise RetrievalError(f"no such file or folder: {str(path)!r}")
    elif not path.is_file():
        raise RetrievalError(
            f"{str(path)!r} is neither a file nor a folder; give files ending in {', '.join(SUFFIXES)}"
        )
    elif path.suffix.lower() not in SUFFIXES:
        raise RetrievalError(f"cannot read {str(path)!r}: suffix {path.suffix!r} is not one of {', '.join(SUFFIXES)}")
    else:
        yield path


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise RetrievalError(f"cannot read {str(error.filename)!r}: {error.strerror}") from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    for file in sorted(files, key=lambda file: file.relative_to(folder).parts):
        if file.suffix.lower() in SUFFIXES and file.is_file():
            yield file
        else:
            logger.debug("skipped %s: not one of %s", file, ", ".join(SUFFIXES))


def _read_file(file: Path, size: PassageSize | None) -> Iterator[_Found]:
    return _read_lines(file) if file.suffix.lower() == ".jsonl" else _read_text(file, size)


def _read_text(file: Path, size: PassageSize | None) -> Iterator[_Found]:
    text = _decode(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(file))
    source = clean_text(str(file))
    for span in split_passages(text, size):
        passage = text[span.start : span.end]
        metadata = {"source": source, "start": span.start, "end": span.end}
        document = Document(id=content_hash("", passage), page_content=passage, metadata=metadata)
        yield _Found(document, f"{source} (characters {span.start} to {span.end})")


def _read_lines(file: Path) -> Iterator[_Found]:
    source = clean_text(str(file))
    without_text = 0
    with file.open("rb") as handle:
        for number, data in enumerate(handle, start=1):
            place = f"{source}:{number}"
            line = _decode(data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data, place)
            if not line.strip():
                continue
            document = _parse_line(line, source, place)
            if document.page_content.strip():
                yield _Found(document, place)
            else:
                without_text += 1
    if without_text:
        logger.warning("%s: left out %s documents without text", source, without_text)


def _parse_line(line: str, source: str, place: str) -> Document:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RetrievalError(f"{place}: not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise RetrievalError(f"{place}: a {type(record).__name__}, expected a JSON object with 'text'")
    text = next((record[field] for field in _TEXT_FIELDS if record.get(field) is not None), None)
    if not isinstance(text, str):
        raise RetrievalError(f"{place}: no text; the object needs a string in one of {', '.join(_TEXT_FIELDS)}")
    metadata = {"source": source, **_metadata(record, place)}
    name = next((record[field] for field in _ID_FIELDS if record.get(field) not in (None, "")), None)
    if name is None:
        name = content_hash(str(metadata.get("title", "")), text)
    elif not isinstance(name, str | int) or isinstance(name, bool):
        raise RetrievalError(f"{place}: id {name!r} must be a string or an integer")
    return Document(id=str(name), page_content=text, metadata=metadata)


def _metadata(record: dict[str, Any], place: str) -> dict[str, Any]:
    metadata = record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise RetrievalError(f"{place}: metadata is a {type(metadata).__name__}, expected an object")
    title = record.get("title")
    if title is None or title == "":
        return metadata
    if not isinstance(title, str):
        raise RetrievalError(f"{place}: title {title!r} must be a string")
    return {**metadata, "title": title}


def _decode(data: bytes, place: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        logger.warning("%s: not UTF-8 (%s); replaced what could not be read", place, error.reason)
        text = data.decode("utf-8", "replace")
    return clean_text(text)
