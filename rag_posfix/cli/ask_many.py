"""``rag-posfix ask --questions FILE --out FILE``: many questions at once, one JSON line each, resumable."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rag_posfix.cli.output import progress_with_text
from rag_posfix.contracts.filters import combine_filters
from rag_posfix.errors import ConfigError, RagPosfixError
from rag_posfix.files import replace_durably
from rag_posfix.parameters import shown
from rag_posfix.text import checked_question

if TYPE_CHECKING:
    from rag_posfix.contracts.answer import Answer, Question
    from rag_posfix.pipeline.pipeline import Pipeline

_FIELDS = ("id", "question", "history", "filter")


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A line of the questions: ``id`` is its number, from 1, if the line has none."""

    id: str
    question: Question


def read_questions(path: Path, filter: Any, use_cache: bool) -> list[QuestionRow]:
    """Return the questions of a file of JSON lines, or one per line of a .txt file.

    ``filter`` applies to all, next to that of a line.

    Raises:
        ConfigError: the file cannot be read, a line is no question, or two have one id. Names the line.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"--questions {str(path)!r} cannot be read: {error.strerror}") from error
    is_plain = path.suffix == ".txt"
    rows: dict[str, QuestionRow] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = _read_row(orjson.dumps(line.decode()) if is_plain else line, number, filter, use_cache)
            if row.id in rows:
                raise ConfigError(f"the id {shown(row.id)} is that of an earlier line; give each question its own")
        except (RagPosfixError, UnicodeDecodeError) as error:
            raise ConfigError(f"--questions {str(path)!r}, line {number}: {error}") from error
        rows[row.id] = row
    if not rows:
        raise ConfigError(f'--questions {str(path)!r} holds no question; write one {{"question": "..."}} per line')
    return list(rows.values())


def _read_row(line: bytes, number: int, filter: Any, use_cache: bool) -> QuestionRow:
    from rag_posfix.contracts.answer import Question

    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"no JSON: {error}") from error
    if isinstance(fields, str):
        fields = {"question": fields}
    if not isinstance(fields, dict) or not isinstance(fields.get("question"), str):
        raise ConfigError('must be a text or an object with the text "question"')
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ConfigError(f"unknown field {shown(unknown[0])}; a question has {', '.join(_FIELDS)}")
    identity = fields.get("id", number)
    if not isinstance(identity, str | int):
        raise ConfigError(f"the id is {type(identity).__name__}, must be a text or a whole number")
    checked_question(fields["question"])
    question = Question(
        fields["question"],
        history=fields.get("history") or (),
        filter=combine_filters(filter, fields.get("filter")),
        use_cache=use_cache,
    )
    return QuestionRow(str(identity), question)


class AnswerFile:
    """The file of answers, one JSON line each; each is written whole before the next one.

    A last line without an end, which a killed run left, is removed; so are the lines of questions that failed, which
    are asked again.

    Raises:
        ConfigError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.questions: dict[str, str] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
            lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
            answered = b"".join(line for number, line in enumerate(lines, 1) if self._is_answer(line, number))
            if answered != data:
                replace_durably(path, answered)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--out {str(path)!r} cannot be written: {error.strerror}") from error

    def _is_answer(self, line: bytes, number: int) -> bool:
        """Note the question of a line; return whether it was answered."""
        try:
            row = orjson.loads(line)
            identity, question = row["id"], row["question"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--out {str(self._path)!r}, line {number} is no answer of an earlier run; choose another file"
            ) from error
        if "error" in row:
            return False
        self.questions[identity] = question
        return True

    def missing(self, rows: Sequence[QuestionRow]) -> list[QuestionRow]:
        """Return the questions without a line; ConfigError if one has the line of another question."""
        for row in rows:
            if self.questions.get(row.id, row.question.text) != row.question.text:
                raise ConfigError(
                    f"--out {str(self._path)!r} has another question under the id {shown(row.id)}; choose another file"
                )
        return [row for row in rows if row.id not in self.questions]

    def add(self, row: QuestionRow, result: Answer | Exception) -> None:
        """Write the line of a question: the fields of ``ask --json``, or ``error`` and its ``type``."""
        fields: dict[str, Any] = {"id": row.id, "question": row.question.text}
        if isinstance(result, Exception):
            fields |= {"error": str(result), "type": type(result).__name__}
        else:
            fields |= result.to_dict()
        self._file.write(orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS) + b"\n")

    def close(self) -> None:
        """Write everything to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def answer_all(pipeline: Pipeline, rows: Sequence[QuestionRow], answers: AnswerFile) -> int:
    """Answer the questions together, and write each answer as soon as it is there; return how many failed."""
    n_failed, started = 0, time.monotonic()
    with progress_with_text() as move, closing(pipeline.batch_as_completed([row.question for row in rows])) as results:
        for done, (index, result) in enumerate(results, 1):
            if isinstance(result, Exception) and not isinstance(result, RagPosfixError):
                raise result  # a fault of the program, not of the question
            answers.add(rows[index], result)
            n_failed += isinstance(result, Exception)
            left = (time.monotonic() - started) / done * (len(rows) - done)
            move(done, len(rows), f"answered, {left:.0f} s left")
    return n_failed
