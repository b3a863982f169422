"""A question whose gold passages can be put at any position among its distractors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError

__all__ = ["GoldPosition", "PositionExample", "position_label", "question_and_answers", "visible"]

GoldPosition = int | tuple[int, ...]
"""The position of the gold passage in the prompt, from 0, or the positions of several gold passages in their order."""


@dataclass(frozen=True, slots=True)
class PositionExample:
    """A question whose gold passages can be put at any position among its distractors.

    Attributes:
        id: The number of its row in the file, or the name that the file gives it.
        question: The question.
        answers: Accepted answers, the first one the most usual.
        gold: The passages that the answer needs: one, or two of a multi-hop question.
        distractors: The others, the most tempting first.

    Raises:
        EvaluationError: ``gold`` is no tuple of documents.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Document, ...]
    distractors: tuple[Document, ...]

    def __post_init__(self) -> None:
        if not (isinstance(self.gold, tuple) and self.gold and all(isinstance(one, Document) for one in self.gold)):
            raise EvaluationError(
                f"question {self.id}: gold is a {type(self.gold).__name__}, must be a tuple of one document or more"
            )

    def documents(self, count: int, gold_position: GoldPosition | None = None) -> list[Document]:
        """Return the gold passages and the first distractors, ``count`` in all.

        Args:
            gold_position: Where the gold passages stand; None puts them first.

        Raises:
            EvaluationError: there are too few distractors, or no such positions for the gold passages.
        """
        most = len(self.distractors) + len(self.gold)
        if not len(self.gold) <= count <= most:
            raise EvaluationError(
                f"documents={count} must be between {len(self.gold)} and {most}, what question {self.id} has"
            )
        placed = dict(zip(self._checked(gold_position, count), self.gold, strict=True))
        others = iter(self.distractors)
        return [placed.get(position) or next(others) for position in range(count)]

    def _checked(self, gold_position: GoldPosition | None, count: int) -> tuple[int, ...]:
        if gold_position is None:
            return tuple(range(len(self.gold)))
        positions = (gold_position,) if isinstance(gold_position, int) else tuple(gold_position)
        if len(positions) != len(self.gold):
            raise EvaluationError(
                f"gold position {position_label(positions)} places {len(positions)} passages, but question {self.id} "
                f"has {len(self.gold)} gold; give a position for each, for example 4, or 0+9 for two"
            )
        if len(set(positions)) < len(positions) or not all(0 <= one < count for one in positions):
            raise EvaluationError(
                f"gold position {position_label(positions)} must be between 0 and {count - 1}, each once"
            )
        return positions


def position_label(gold_position: GoldPosition) -> str:
    """Return positions as text: ``4``, or ``0+9`` for two gold passages."""
    return str(gold_position) if isinstance(gold_position, int) else "+".join(map(str, gold_position))


def question_and_answers(question: Any, answers: Any) -> tuple[str, tuple[str, ...]]:
    """Return question and answers, each answer once.

    Raises:
        ValueError: one is no visible text.
    """
    if not visible(question):
        raise ValueError(f"question is {question!r}, must be text")
    if not isinstance(answers, list) or not answers or not all(map(visible, answers)):
        raise ValueError(f"answers is {answers!r}, must be a list of one text or more")
    return question, tuple(dict.fromkeys(answers))


def visible(text: object) -> bool:
    """Return whether ``text`` is a string with more than white space."""
    return isinstance(text, str) and bool(text.strip())
