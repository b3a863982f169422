"""A test collection: documents, topics with judgements, and counts of unusable parts of the files.

Documents and queries are JSON lines (BEIR), tab-separated text or TREC markup, detected by content.
"""

from __future__ import annotations

from collections.abc import Collection as Names
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.trec import (
    checked_id,
    read_lines,
    read_markup_documents,
    read_markup_topics,
    read_qrels,
)
from rag_posfix.text import clean_text, content_hash, parse_json

__all__ = ["BeirFiles", "Collection", "Topic", "beir_files", "load_collection", "load_topics"]

_TEXT = ("text", "contents", "page_content")


@dataclass(frozen=True, slots=True)
class BeirFiles:
    """The paths of the three parts of a collection."""

    corpus: Path
    queries: Path
    qrels: Path


@dataclass(frozen=True, slots=True)
class Topic:
    """A judged query.

    Attributes:
        grades: Document id -> grade; 1 and above is relevant.
    """

    id: str
    question: str
    grades: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Collection:
    """The documents of a test collection.

    Attributes:
        documents: Documents by id, in the order of the file, including those without text.
        digest: Hash of ids, titles and texts of all documents of the file.
        counts: Numbers of used and unusable parts of the files, for the record.
    """

    documents: Mapping[str, Document]
    digest: str
    counts: Mapping[str, int]


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

    def in_folder(name: str, option: str) -> Path:
        if folder is None:
            raise EvaluationError(f"{option} is missing; give it, or a BEIR folder that holds {name} as --corpus")
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
        raise EvaluationError(f"{folder} has no {name} and no {name}.gz; give {option}, or another BEIR folder")

    return BeirFiles(
        corpus=in_folder("corpus.jsonl", "--corpus") if folder else corpus,
        queries=queries or in_folder("queries.jsonl", "--queries"),
        qrels=qrels or in_folder(f"qrels/{split}.tsv", "--qrels"),
    )


def load_topics(
    files: BeirFiles, *, limit: int | None = None, skip: int = 0, binary: bool = False
) -> tuple[list[Topic], dict[str, int]]:
    """Return the topics that were judged, in the order of the queries, and counts of what was left out.

    A query without judgements cannot score a ranking and is skipped. A topic with judgements of 0 alone is searched
    and scores 0, as in trec_eval.

    Args:
        limit: Maximum number of topics.
        skip: Number of topics to leave out at the start, so that settings can be chosen on others.
        binary: Count every grade above 0 as 1.

    Raises:
        EvaluationError: a file is missing or malformed, two queries have one id, or no query was judged.
    """
    qrels = read_qrels(files.qrels)
    questions: dict[str, str] = {}
    for location, name, text in read_queries(files.queries):
        if questions.setdefault(name, text) != text:
            raise EvaluationError(f"{location}: query id {name!r} stands for two texts; make the ids distinct")
    judged = [name for name in questions if name in qrels]
    if not judged:
        raise EvaluationError(
            f"no query of {files.queries} is judged in {files.qrels}; the ids must be the same, first judged id: "
            f"{next(iter(qrels))!r}, first query id: {next(iter(questions))!r}"
        )
    chosen = judged[skip:] if limit is None else judged[skip : skip + limit]
    if not chosen:
        raise EvaluationError(f"skip={skip} leaves none of {len(judged)} judged queries; lower it")
    topics = [
        Topic(name, questions[name], {d: min(grade, 1) if binary else grade for d, grade in qrels[name].items()})
        for name in chosen
    ]
    return topics, {
        "queries": len(questions),
        "queries_without_judgements": len(questions) - len(judged),
        "judged_queries_without_text": len(qrels) - len(judged),
        "topics": len(topics),
        "topics_without_relevant": sum(not any(grade > 0 for grade in t.grades.values()) for t in topics),
    }


def load_collection(
    path: Path, topics: list[Topic], *, titles: bool = True, only: Names[str] | None = None
) -> Collection:
    """Return the documents of a corpus; one that is in the file twice with the same content is read once.

    Args:
        topics: Used to count judgements of documents that the corpus lacks.
        titles: Keep titles; without them documents are their text alone, for corpora with titles repeated in the text.
        only: Keep documents with these ids alone in memory, all if None.

    Raises:
        EvaluationError: the file is missing or malformed, a document has no id, or two documents share an id.
    """
    documents: dict[str, Document] = {}
    hashes: dict[str, str] = {}
    without_text = 0
    for location, document in read_collection_documents(path):
        if not titles:
            document.metadata.pop("title", None)
        name = str(document.id)
        content = content_hash(name, str(document.metadata.get("title", "")), document.page_content)
        if hashes.setdefault(name, content) != content:
            raise EvaluationError(f"{location}: id {name!r} stands for two documents; make the ids distinct")
        if name not in documents and (only is None or name in only):
            documents[name] = document
            without_text += not document.page_content.strip()
    if not hashes:
        raise EvaluationError(f"{path} holds no documents; give BEIR's JSON lines, tab-separated lines or TREC files")
    judged = {name for topic in topics for name in topic.grades}
    return Collection(
        documents=documents,
        digest=content_hash(*sorted(hashes.values())),
        counts={
            "documents": len(hashes),
            "documents_without_text": without_text,
            "judged_documents_not_in_corpus": len(judged - hashes.keys()),
        },
    )


def read_collection_documents(path: Path) -> Iterator[tuple[str, Document]]:
    """Yield (location, document) of a file, ``id`` set and ``metadata["title"]`` where there is one.

    JSON lines have ``_id`` or ``id``, ``text`` (or ``contents``) and optionally ``title``; tab-separated lines have
    id, text and optionally title; TREC documents are ``<DOC>`` elements. The text may be empty.
    """
    kind = _kind(path)
    rows: Iterator[tuple[str, Any, str, str]]
    if kind == "markup":
        rows = read_markup_documents(path)
    elif kind == "json":
        rows = (
            (location, _name(row), _title(row, location), _text(row, location)) for location, row in _records(path)
        )
    else:
        lines = ((location, [*_columns(line, location, 3), ""]) for location, line in read_lines(path))
        rows = ((location, columns[0], columns[2], columns[1]) for location, columns in lines)
    for location, name, title, text in rows:
        title = clean_text(title).strip()
        metadata = {"title": title} if title else {}
        name = checked_id(name, location, "document")
        yield location, Document(id=name, page_content=clean_text(text), metadata=metadata)


def read_queries(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (location, id, text) of the queries of a file.

    JSON lines have ``_id`` or ``id`` and ``text``; tab-separated lines have id and text; TREC topics are ``<top>`` or
    ``<topic>`` elements.
    """
    kind = _kind(path)
    rows: Iterator[tuple[str, Any, str]]
    if kind == "markup":
        rows = read_markup_topics(path)
    elif kind == "json":
        rows = ((location, _name(row), _text(row, location)) for location, row in _records(path))
    else:
        lines = ((location, _columns(clean_text(line), location, 2)) for location, line in read_lines(path))
        rows = ((location, columns[0], columns[1]) for location, columns in lines)
    for location, name, text in rows:
        name = checked_id(name, location, "query")
        if not text.strip():
            raise EvaluationError(f"{location}: query {name!r} has no text; give it some or leave it out")
        yield location, name, text


def _kind(path: Path) -> str:
    for _, line in read_lines(path):
        first = line.lstrip()[0]
        return {"{": "json", "<": "markup"}.get(first, "columns")
    raise EvaluationError(f"{path} is empty; give BEIR's JSON lines, tab-separated lines or TREC's markup")


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for location, line in read_lines(path):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise EvaluationError(f"{location} is not JSON ({error}); each line must be one JSON object") from error
        if not isinstance(record, dict):
            raise EvaluationError(f"{location} is a {type(record).__name__}, must be a JSON object with _id and text")
        yield location, record


def _name(record: dict[str, Any]) -> Any:
    return next((record[field] for field in ("_id", "id") if record.get(field) not in (None, "")), None)


def _text(record: dict[str, Any], location: str) -> str:
    text = next((record[field] for field in _TEXT if record.get(field) is not None), None)
    if not isinstance(text, str):
        raise EvaluationError(f"{location}: no text; the object needs a string in one of {', '.join(_TEXT)}")
    return text


def _title(record: dict[str, Any], location: str) -> str:
    title = record.get("title")
    if title is not None and not isinstance(title, str):
        raise EvaluationError(f"{location}: title {title!r} must be a string")
    return title or ""


def _columns(line: str, location: str, max_columns: int) -> list[str]:
    columns = line.split("\t")
    if not 2 <= len(columns) <= max_columns:
        raise EvaluationError(
            f"{location} has {len(columns)} tab-separated columns, must have "
            f"{'2 or 3: id and text, then a title' if max_columns > 2 else '2: id and text'}"
        )
    return columns
