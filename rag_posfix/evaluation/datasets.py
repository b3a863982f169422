"""Questions with one gold passage and distractors, from files on disk."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError

__all__ = ["PositionExample", "load_examples"]


@dataclass(frozen=True, slots=True)
class PositionExample:
    """A question whose gold passage can be put at any place among its distractors.

    Attributes:
        id: Its place in the file.
        question: The question.
        answers: Accepted answers, the first one the most usual.
        gold: The passage that holds the answer.
        distractors: The others, the most tempting first.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: Document
    distractors: tuple[Document, ...]

    def documents(self, count: int, gold_position: int) -> list[Document]:
        """Return the gold passage and the first ``count - 1`` distractors, the gold one at ``gold_position``.

        Raises:
            EvaluationError: there are too few distractors, or the position is outside of the list.
        """
        if not 1 <= count <= len(self.distractors) + 1:
            raise EvaluationError(
                f"documents={count} must be between 1 and {len(self.distractors) + 1}, what question {self.id} has"
            )
        if not 0 <= gold_position < count:
            raise EvaluationError(f"gold position {gold_position} must be between 0 and {count - 1}")
        others = list(self.distractors[: count - 1])
        return [*others[:gold_position], self.gold, *others[gold_position:]]


def load_examples(path: Path, limit: int | None = None, skip: int = 0) -> list[PositionExample]:
    """Read Lost-in-the-Middle rows (``.jsonl`` or ``.jsonl.gz``).

    Args:
        path: Rows with ``question``, ``answers`` and ``ctxs``, of which one has ``isgold``.
        limit: At most this many rows.
        skip: Rows to leave out at the start, so that settings can be chosen on other rows than those reported.

    Raises:
        EvaluationError: the file is missing or a row is malformed.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is not a file; give the path of a .jsonl or .jsonl.gz file")
    examples: list[PositionExample] = []
    for number, line in enumerate(_lines(path)):
        if limit is not None and len(examples) >= limit:
            break
        if number < skip or not line.strip():
            continue
        try:
            examples.append(_example(json.loads(line), number))
        except (AttributeError, KeyError, ValueError, TypeError, StopIteration) as error:
            raise EvaluationError(
                f"{path}:{number + 1} is not a Lost-in-the-Middle row ({type(error).__name__}: {error}); it needs "
                "question, answers and ctxs with one isgold"
            ) from error
    if not examples:
        raise EvaluationError(f"{path} holds no rows after the first {skip}; lower skip or choose another file")
    return examples


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it must be UTF-8 text, compressed where its "
            "name ends in .gz"
        ) from error


def _example(row: dict[str, Any], number: int) -> PositionExample:
    question, answers = row["question"], row["answers"]
    if not _visible(question):
        raise ValueError(f"question is {question!r}, must be text")
    if not isinstance(answers, list) or not answers or not all(map(_visible, answers)):
        raise ValueError(f"answers is {answers!r}, must be a list of one text or more")
    contexts: Sequence[dict[str, Any]] = row["ctxs"]
    documents = [
        Document(page_content=c["text"], metadata={"title": c.get("title", "")}, id=f"{number}-{i}")
        for i, c in enumerate(contexts)
    ]
    gold = next(i for i, context in enumerate(contexts) if context.get("isgold"))
    return PositionExample(
        id=str(number),
        question=question,
        answers=tuple(answers),
        gold=documents[gold],
        distractors=tuple(d for i, d in enumerate(documents) if i != gold),
    )


def _visible(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip())
