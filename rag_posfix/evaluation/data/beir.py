"""Reads documents and queries: JSON lines (BEIR), tab-separated text or TREC markup, detected by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.files import checked_id, read_lines
from rag_posfix.evaluation.data.trec_text import read_markup_documents, read_markup_topics
from rag_posfix.text import clean_text, parse_json

__all__ = ["Location", "beir_files", "read_collection_documents", "read_queries"]

Location = str
_TEXT = ("text", "contents", "page_content")


@dataclass(frozen=True, slots=True)
class BeirFiles:
    """The paths of the three parts of a collection."""

    corpus: Path
    queries: Path
    qrels: Path


def beir_files(corpus: Path, queries: Path | None, qrels: Path | None, split: str = "test") -> BeirFiles:
    """Return the paths of a collection; parts that are not given must be in the folder ``corpus``.

    Args:
        corpus: A BEIR folder (``corpus.jsonl``, ``queries.jsonl``, ``qrels/test.tsv``, each also as ``.gz``), or the
            file of documents.
        split: Name of the file in ``qrels/``.

    Raises:
        EvaluationError: a part is neither given nor in the folder.
    """
    folder = corpus if corpus.is_dir() else None
    return BeirFiles(
        corpus=_in_folder(corpus, "corpus.jsonl", "--corpus") if folder else corpus,
        queries=queries or _in_folder(folder, "queries.jsonl", "--queries"),
        qrels=qrels or _in_folder(folder, f"qrels/{split}.tsv", "--qrels"),
    )


def _in_folder(folder: Path | None, name: str, option: str) -> Path:
    if folder is None:
        raise EvaluationError(f"{option} is missing; give it, or a BEIR folder that holds {name} as --corpus")
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise EvaluationError(f"{folder} has no {name} and no {name}.gz; give {option}, or another BEIR folder")


def read_collection_documents(path: Path) -> Iterator[tuple[Location, Document]]:
    """Yield (location, document) of a file, ``id`` set and ``metadata["title"]`` where there is one.

    JSON lines have ``_id`` or ``id``, ``text`` (or ``contents``) and optionally ``title``; tab-separated lines have
    id, text and optionally title; TREC documents stand in ``<DOC>``. The text may be empty.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file cannot be read, or a document is malformed or has no usable id.
    """
    kind = _kind(path)
    if kind == "markup":
        for location, name, title, text in read_markup_documents(path):
            yield location, _document(name, title, text, location)
        return
    for location, line in read_lines(path):
        if kind == "json":
            record = _record(line, location)
            yield location, _document(_name(record), _title(record, location), _text(record, location), location)
        else:
            name, text, *rest = _columns(line, location, 3)
            yield location, _document(name, rest[0] if rest else "", text, location)


def read_queries(path: Path) -> Iterator[tuple[Location, str, str]]:
    """Yield (location, id, text) of the queries of a file.

    JSON lines have ``_id`` or ``id`` and ``text``; tab-separated lines have id and text; TREC topics stand in
    ``<top>`` or ``<topic>``.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file cannot be read, or a query is malformed, empty or has no usable id.
    """
    kind = _kind(path)
    if kind == "markup":
        found: Iterator[tuple[str, Any, str]] = read_markup_topics(path)
    elif kind == "json":
        records = ((location, _record(line, location)) for location, line in read_lines(path))
        found = ((location, _name(record), _text(record, location)) for location, record in records)
    else:
        lines = ((location, _columns(clean_text(line), location, 2)) for location, line in read_lines(path))
        found = ((location, columns[0], columns[1]) for location, columns in lines)
    for location, name, text in found:
        name = checked_id(name, location, "query")
        if not text.strip():
            raise EvaluationError(f"{location}: query {name!r} has no text; give it some or leave it out")
        yield location, name, text


def _kind(path: Path) -> str:
    for _, line in read_lines(path):
        first = line.lstrip()[0]
        return {"{": "json", "<": "markup"}.get(first, "columns")
    raise EvaluationError(f"{path} is empty; give BEIR's JSON lines, tab-separated lines or TREC's markup")


def _record(line: str, location: Location) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise EvaluationError(f"{location} is not JSON ({error}); each line must be one JSON object") from error
    if not isinstance(record, dict):
        raise EvaluationError(f"{location} is a {type(record).__name__}, must be a JSON object with _id and text")
    return record


def _name(record: dict[str, Any]) -> Any:
    return next((record[field] for field in ("_id", "id") if record.get(field) not in (None, "")), None)


def _text(record: dict[str, Any], location: Location) -> str:
    text = next((record[field] for field in _TEXT if record.get(field) is not None), None)
    if not isinstance(text, str):
        raise EvaluationError(f"{location}: no text; the object needs a string in one of {', '.join(_TEXT)}")
    return text


def _title(record: dict[str, Any], location: Location) -> str:
    title = record.get("title")
    if title is not None and not isinstance(title, str):
        raise EvaluationError(f"{location}: title {title!r} must be a string")
    return title or ""


def _columns(line: str, location: Location, most: int) -> list[str]:
    columns = line.split("\t")
    if not 2 <= len(columns) <= most:
        raise EvaluationError(
            f"{location} has {len(columns)} tab-separated columns, must have 2{' or 3' if most > 2 else ''}: id and "
            f"text{', then a title' if most > 2 else ''}"
        )
    return columns


def _document(name: object, title: str, text: str, location: Location) -> Document:
    title = clean_text(title).strip()
    return Document(
        id=checked_id(name, location, "document"), page_content=clean_text(text),
        metadata={"title": title} if title else {},
    )  # fmt: skip
