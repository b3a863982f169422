"""Lost-in-the-Middle rows: a question with one gold passage among retrieved distractors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from rag_posfix.evaluation.data.position_example import PositionExample, question_and_answers


def lost_in_the_middle_example(row: Mapping[str, Any], number: int) -> PositionExample:
    """Return the question of a row with ``question``, ``answers`` and ``ctxs``, of which one has ``isgold``.

    Raises:
        AttributeError, KeyError, StopIteration, TypeError, ValueError: the row is malformed.
    """
    question, answers = question_and_answers(row["question"], row["answers"])
    contexts: Sequence[dict[str, Any]] = row["ctxs"]
    documents = [
        Document(page_content=c["text"], metadata={"title": c.get("title", "")}, id=f"{number}-{i}")
        for i, c in enumerate(contexts)
    ]
    gold = next(i for i, context in enumerate(contexts) if context.get("isgold"))
    return PositionExample(
        id=str(number),
        question=question,
        answers=answers,
        gold=(documents[gold],),
        distractors=tuple(d for i, d in enumerate(documents) if i != gold),
    )
