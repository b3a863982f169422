"""Labelled questions of one's own: two files, questions and passages; and a check that names what is wrong where."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
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
    visible,
    with_own_ids,
)
from rag_posfix.evaluation.grading import best_subspan_em, is_unspaced, normalize
from rag_posfix.text import allow_long_cells, is_pair, split_words

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
