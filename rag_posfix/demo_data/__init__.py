"""The passages and questions of the demo: a small invented encyclopaedia.

Every town, person, ship and plant in it is fictional, so a model cannot know an answer from its training; it has to
find it in the passages. Most passages belong to a family of look-alikes (three lighthouses, three ferries, ...)
that differ in names, numbers and materials only, which makes them hard distractors for each other.

The files are package data, UTF-8 JSON lines: ``passages.jsonl`` and ``questions.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.documents import Document

__all__ = ["DemoQuestion", "load_passages", "load_questions"]


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question that exactly one passage of the demo corpus answers.

    Attributes:
        id: The id of the question, unique among the questions.
        question: The question; it names its subject.
        answer: The short answer, as written in the gold passage.
        answers: Every accepted form of the answer, ``answer`` first. None of them occurs in a distractor.
        gold: The id of the passage with the answer.
        distractors: The ids of passages without the answer, the most similar to the gold passage first.
    """

    id: str
    question: str
    answer: str
    answers: tuple[str, ...]
    gold: str
    distractors: tuple[str, ...]


def load_passages() -> list[Document]:
    """Return the passages of the demo corpus in the order of the file: id, text, and ``title`` in the metadata."""
    from langchain_core.documents import Document

    return [
        Document(id=row["id"], page_content=row["text"], metadata={"title": row["title"]})
        for row in _rows("passages.jsonl")
    ]


def load_questions() -> tuple[DemoQuestion, ...]:
    """Return the questions of the demo corpus, in the order of the file."""
    return tuple(
        DemoQuestion(
            id=row["id"],
            question=row["question"],
            answer=row["answer"],
            answers=tuple(row["answers"]),
            gold=row["gold"],
            distractors=tuple(row["distractors"]),
        )
        for row in _rows("questions.jsonl")
    )


def _rows(name: str) -> Iterator[dict[str, Any]]:
    lines = files(__name__).joinpath(name).read_text(encoding="utf-8").splitlines()
    return (json.loads(line) for line in lines if line)
