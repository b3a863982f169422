"""A test collection: documents, topics with judgements, and counts of unusable parts of the files.

Documents and queries are JSON lines (BEIR), tab-separated text or TREC markup, detected by content.

TREC files line by line: judgements, runs, and documents and topics in markup; errors name ``file:line``.

Labelled questions of one's own: two files, questions and passages; and a check that names what is wrong where.
"""

from __future__ import annotations

import csv
import ctypes
import gzip
import html
import io
import json
import math
import re
import zlib
from collections.abc import Collection as Names
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import (
    ROW_ERRORS,
    PositionExample,
    example_of_row,
    load_examples,
    malformed,
    question_and_answers,
    read_text,
    row_id,
    squad_articles,
    unreadable,
    visible,
    with_own_ids,
)
from rag_posfix.evaluation.record import write_whole
from rag_posfix.evaluation.statistics import best_subspan_em, is_unspaced, normalize
from rag_posfix.text import allow_long_cells, clean_text, content_hash, is_pair, parse_json, split_words

__all__ = ["BeirFiles", "Collection", "Topic", "beir_files", "load_collection", "load_topics"]


Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> grade."""

Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score."""

_GAP = 1e-6  # several times the spacing of single precision, which trec_eval keeps scores in
_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_TOPIC = re.compile(r"<topic\b[^>]*number\s*=\s*[\"']([^\"']+)[\"']", re.IGNORECASE)
_NUMBER = re.compile(r"<num>\s*(?:number\s*:)?\s*([^\s<]+)", re.IGNORECASE)
_TITLE = re.compile(r"<(?:title|query)\b[^>]*>(.*?)(?=<|\Z)", re.IGNORECASE | re.DOTALL)


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (location, line) of every line with visible characters; a location reads ``file:number``.

    The file is UTF-8 text, compressed where its name ends in ``.gz``; a byte order mark is passed over.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is not a file; give the path of a file, .gz or plain")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def write_text(path: Path, texts: Iterable[str | bytes]) -> None:
    """Write a file (text as UTF-8) completely or not at all, replacing one that is there."""
    write_whole(path, (text.encode() if isinstance(text, str) else text for text in texts))


def checked_id(value: object, location: str, what: str) -> str:
    """Return an id that TREC files can hold: text without white space; integers become text."""
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name:
        raise EvaluationError(f"{location}: {what} without an id (found {value!r}); give each an id, text or integer")
    if name.split() != [name] or "\0" in name:
        raise EvaluationError(f"{location}: {what} id {name!r} holds white space, which TREC files cannot; rename it")
    return name


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Return judgements from ``query iteration document grade`` (TREC) or ``query document grade`` (BEIR).

    BEIR's form is separated by tabs and may start with a header. A pair that is judged twice with the same grade
    counts once.
    """
    qrels: dict[str, dict[str, int]] = {}
    for index, (location, line) in enumerate(read_lines(path)):
        columns = line.split()
        if len(columns) not in (3, 4):
            raise EvaluationError(
                f"{location} has {len(columns)} columns; judgements have 'query iteration document grade' (TREC) or "
                "'query document grade' (BEIR)"
            )
        query, document, text = columns[0], *columns[-2:]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value.is_integer():  # neither a fraction nor infinite
            if index == 0 and len(columns) == 3:  # BEIR's header
                continue
            raise EvaluationError(f"{location}: grade {text!r} is not an integer; 0 is not relevant, 1 and above are")
        grades = qrels.setdefault(checked_id(query, location, "query"), {})
        if grades.setdefault(checked_id(document, location, "document"), int(value)) != value:
            raise EvaluationError(
                f"{location}: query {query!r} and document {document!r} are judged {grades[document]} and "
                f"{int(value)}; keep one grade"
            )
    if not qrels:
        raise EvaluationError(f"{path} holds no judgements; give a TREC or BEIR qrels file")
    return qrels


def read_run(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Return the ranking of each query, best first: ``query Q0 document rank score tag``.

    The score decides and the rank column is not read, as in trec_eval: scores are compared in single precision, and
    equal ones are ordered by document id, descending.
    """
    run: dict[str, dict[str, float]] = {}
    for location, line in read_lines(path):
        columns = line.split(maxsplit=5)
        if len(columns) != 6:
            raise EvaluationError(
                f"{location} has {len(columns)} columns; a run has: query Q0 document rank score tag"
            )
        query, document, text = columns[0], columns[2], columns[4]
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise EvaluationError(f"{location}: score {text!r} must be a finite number; give each document one")
        scores = run.setdefault(query, {})
        if document in scores:
            raise EvaluationError(
                f"{location}: document {document!r} is listed twice for query {query!r}; keep one line"
            )
        scores[document] = score
    if not run:
        raise EvaluationError(f"{path} holds no ranking; give a TREC run file")
    ranked = {}
    for query, scores in run.items():
        by_id = sorted(scores.items(), key=lambda pair: pair[0].encode(), reverse=True)
        ranked[query] = sorted(by_id, key=lambda pair: -ctypes.c_float(pair[1]).value)
    return ranked


def decreasing(scores: Sequence[float]) -> list[float]:
    """Return scores that no reader of a run can put into another order: each is below the one before.

    trec_eval orders equal scores by document id and keeps scores in single precision. A score that is not lower than
    the one before it by more than 1e-6 (relative to that one, where it is above 1) is moved down to there. So one that
    follows k ties or near ties lies up to k times 1e-6 below its input; all other scores keep nine digits of theirs.

    Args:
        scores: From best to worst, equal ones in the order that shall stay.
    """
    result: list[float] = []
    for score in scores:
        value = float(f"{score:.9g}")
        if result:
            below = result[-1] - _GAP * max(1.0, abs(result[-1]))
            value = min(value, float(f"{below:.9g}"))
        result.append(value)
    return result


def write_run(path: Path, run: Run, tag: str) -> None:
    """Write a run in TREC's form, queries in the order of ``run``, documents from the highest score to the lowest.

    Args:
        run: Scores that differ within each query (see ``decreasing``).
        tag: Names the run; white space becomes ``-``.
    """
    name = "-".join(tag.split()) or "run"
    write_text(
        path,
        (
            f"{query} Q0 {document} {rank} {score:.9g} {name}\n"
            for query, scores in run.items()
            for rank, (document, score) in enumerate(sorted(scores.items(), key=lambda pair: -pair[1]), start=1)
        ),
    )


def read_markup_documents(path: Path) -> Iterator[tuple[str, str | None, str, str]]:
    """Yield (location, id, title, text) of each ``<DOC>``; None is a missing id.

    The id is ``<DOCNO>``, the title ``<TITLE>`` or ``<HEADLINE>``, the text the content of ``<TEXT>``, or all other
    content where there is no such element. Tags are left out and entities are read.
    """
    for location, block in _blocks(path, "doc"):
        texts = re.findall(r"<text\b[^>]*>(.*?)</text>", block, re.IGNORECASE | re.DOTALL)
        if not texts:
            names = r"docno|docid|title|headline|dochdr"
            texts = [re.sub(rf"<({names})\b[^>]*>.*?</\1>", " ", block, flags=re.IGNORECASE | re.DOTALL)]
        title = _element(block, "title") or _element(block, "headline") or ""
        yield location, _element(block, "docno"), title, _plain("\n".join(texts))


def read_markup_topics(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield (location, id, question) of each ``<top>`` or ``<topic>``; the question is ``<title>`` or ``<query>``."""
    for location, block in _blocks(path, "top(?:ic)?"):
        number = _TOPIC.search(block) or _NUMBER.search(block)
        title = _TITLE.search(block)
        question = re.sub(r"^\s*topic\s*:", "", title[1], flags=re.IGNORECASE) if title else ""
        yield location, number[1].strip() if number else None, _plain(question)


def _blocks(path: Path, name: str) -> Iterator[tuple[str, str]]:
    opening = re.compile(rf"<{name}(\s[^>]*)?>", re.IGNORECASE)
    closing = re.compile(rf"</{name}>", re.IGNORECASE)
    lines: list[str] = []
    start = ""
    for location, line in read_lines(path):
        for part in closing.sub(r"\g<0>\n", line).split("\n"):
            if not lines and opening.search(part):
                start = location
            if start:
                lines.append(part)
                if closing.search(part):
                    yield start, "\n".join(lines)
                    lines, start = [], ""
    if start:
        raise EvaluationError(f"{start}: no closing tag before the end of the file; is the file cut off?")


def _element(block: str, name: str) -> str | None:
    match = re.search(rf"<{name}\b[^>]*>(.*?)</{name}>", block, re.IGNORECASE | re.DOTALL)
    return _plain(match[1]) if match else None


def _plain(text: str) -> str:
    # The outermost element's own tags go with all others.
    return clean_text(" ".join(html.unescape(_TAG.sub(" ", text)).split()))


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


Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class LabelProblem:
    """What is wrong with a row: an ``error`` makes it unusable, a ``warning`` makes its numbers doubtful."""

    row: int
    severity: Severity
    message: str


def load_labels(path: Path, passages: Path | None = None, limit: int | None = None) -> list[PositionExample]:
    """Return labelled questions: of two files, or of one that ``load_examples`` reads.

    Args:
        path: With ``passages``, JSON lines, Parquet or CSV with ``question``, ``answers`` (a list; in CSV separated by
            ``|``) or ``answer``, and ``passage``, the id of the gold passage. Without, Lost-in-the-Middle or HotpotQA
            rows, or SQuAD's format.
        passages: JSON lines with ``id``, ``text`` and perhaps ``title``. The other passages are the distractors, those
            that share the most words with the question first.
        limit: Maximum number of questions.

    Raises:
        EvaluationError: a file cannot be read, a row is malformed, or two questions have one id.
    """
    if passages is None:
        return load_examples(path, limit=limit)
    table = _read_passages(passages)
    examples = []
    for number, row in list(_read_rows(path))[:limit]:
        try:
            examples.append((f"{path}, row {number}", _example(row, number, table)))
        except ROW_ERRORS as error:
            raise EvaluationError(
                f"{path}, row {number}: {malformed(error)}; run rag-posfix data check {path} --passages {passages}"
            ) from error
    if not examples:
        raise EvaluationError(f"{path} holds no question; write a row with question, answers and passage")
    return with_own_ids(examples)


def check_labels(path: Path, passages: Path | None = None) -> tuple[int, list[LabelProblem]]:
    """Return the number of usable questions of a file, and every problem by row, from 1.

    Of a file in SQuAD's format only the first malformed row is named.

    Raises:
        EvaluationError: a file cannot be read at all.
    """
    problems: list[LabelProblem] = []
    examples: list[tuple[int, PositionExample]] = []
    rows: dict[str, int] = {}
    table = None if passages is None else _read_passages(passages)
    if table is None and squad_articles(read_text(path), path) is not None:
        examples = list(enumerate(load_examples(path), 1))
    else:
        for number, row in _read_rows(path):
            try:
                if isinstance(row, str):
                    raise ValueError(row)
                example = example_of_row(row, number - 1) if table is None else _example(row, number, table)
                if rows.setdefault(example.id, number) != number:
                    raise ValueError(f"the id {example.id!r} is that of row {rows[example.id]}; give each its own")
                examples.append((number, example))
            except ROW_ERRORS as error:
                problems.append(LabelProblem(number, "error", malformed(error)))
    first_row: dict[str, int] = {}
    for number, example in examples:
        question = " ".join(split_words(example.question))
        if first_row.setdefault(question, number) != number:
            problems.append(LabelProblem(number, "warning", f"the question is that of row {first_row[question]}"))
        problems += [LabelProblem(number, "warning", message) for message in _doubts(example)]
    return len(examples), sorted(problems, key=lambda problem: problem.row)


def _doubts(example: PositionExample) -> Iterator[str]:
    def holds(documents: Sequence[Document]) -> bool:
        return any(_holds(document.page_content, answer) for document in documents for answer in example.answers)

    for answer in example.answers:
        if not normalize(answer):
            yield f"the accepted answer {answer!r} has only articles and punctuation; write one that answers match"
    if not holds(example.gold):
        yield "no accepted answer is in the gold passage, word by word"
    others = sum(holds([document]) for document in example.distractors[:20])
    if others:
        yield f"an accepted answer is also in {others} other passages; they count as wrong positions"
    if not example.distractors:
        yield "there is no other passage, so the position of the gold passage cannot change"


def _holds(text: str, answer: str) -> bool:
    """Return whether a text has an answer: word by word, in scripts without clear words as answers are graded."""
    words = split_words(answer)
    if is_unspaced(answer) or any(map(is_pair, words)):
        return best_subspan_em(text, [answer]) > 0
    return f" {' '.join(words)} " in f" {' '.join(split_words(text))} "


class _Passage(NamedTuple):
    document: Document
    words: frozenset[str]


def _example(row: Mapping[str, Any], number: int, passages: Mapping[str, _Passage]) -> PositionExample:
    answers = row["answers"] if row.get("answers") else [row["answer"]]
    question, accepted = question_and_answers(row["question"], answers)
    name = str(row["passage"])
    if name not in passages:
        raise ValueError(f"passage {name!r} is not among the {len(passages)} passages")
    words = set(split_words(question))
    others = [passage for key, passage in passages.items() if key != name]
    others.sort(key=lambda passage: -len(words & passage.words))
    distractors = tuple(passage.document for passage in others)
    return PositionExample(row_id(row, number), question, accepted, (passages[name].document,), distractors)


def _read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number and row of a file of CSV, Parquet or JSON lines; for what is no row, a text with the reason."""
    text = read_text(path)
    if path.name.removesuffix(".gz").endswith(".csv"):
        allow_long_cells(text)
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 1):
            yield number, {**row, "answers": [answer for answer in (row.get("answers") or "").split("|") if answer]}
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                yield number, f"is not JSON: {error}"
            else:
                yield number, value if isinstance(value, dict) else f"is {type(value).__name__}, must be a JSON object"


def _read_passages(path: Path) -> dict[str, _Passage]:
    passages: dict[str, _Passage] = {}
    for number, row in _read_rows(path):
        if not isinstance(row, dict) or "id" not in row or not visible(row.get("text")):
            raise EvaluationError(f"{path}, row {number} is not a passage; it needs id and text")
        if str(row["id"]) in passages:
            raise EvaluationError(f"{path}, row {number} repeats the id {row['id']!r}; give each passage its own")
        metadata = {"title": row["title"]} if visible(row.get("title")) else {}
        document = Document(page_content=row["text"], id=str(row["id"]), metadata=metadata)
        passages[str(row["id"])] = _Passage(document, frozenset(split_words(row["text"])))
    return passages
