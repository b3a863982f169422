"""Passages that disagree: the answer of a passage in which the judge finds one, and which lacks the answer given.

Only such a passage is read once more, alone: where passages agree, this costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from langchain_core.documents import Document

from rag_posfix.contracts.answer import Disagreement
from rag_posfix.pipeline.citations import find_evidence
from rag_posfix.pipeline.support import YES_FROM, compare_words, passage_name
from rag_posfix.pipeline.versions import date_of

MAX_RIVALS = 3
"""Passages that are read once more at most, those with the highest odds."""

RIVAL_TOKENS = 24


def rival_answers(
    answer: str,
    question: str,
    passages: Sequence[str],
    odds: Sequence[float | None],
    answer_alone: Callable[[int], str],
) -> list[tuple[str, int]]:
    """Return answers that contradict ``answer``, each with the index of its passage.

    A passage is asked if its log-odds are ``YES_FROM`` or more and it lacks the answer that another passage has. Its
    answer counts if the passage has all its words, and if it ``contradicts`` the answer given.

    Args:
        answer_alone: Returns what the model answers from the passage of an index alone.
    """
    words = compare_words(answer, passages, question)
    if words.verdict != "all":
        return []
    asked = [
        index
        for index, value in enumerate(odds)
        if value is not None and value >= YES_FROM and index not in words.holders
    ]
    asked.sort(key=lambda index: -(odds[index] or 0.0))
    rivals = []
    for index in asked[:MAX_RIVALS]:
        lines = answer_alone(index).strip().splitlines()
        text = lines[0].strip() if lines else ""
        if compare_words(text, [passages[index]], question).verdict == "all" and contradicts(text, answer, question):
            rivals.append((text, index))
    return rivals


def contradicts(one: str, other: str, question: str) -> bool:
    """Return whether two answers to a question cannot both be right: other numbers, or no word in common.

    An answer with more detail than the other shares its words and does not contradict it.
    """
    first, second = find_evidence(one, question), find_evidence(other, question)
    numbers = [{word for word in words if any(map(str.isdigit, word))} for words in (first, second)]
    if all(numbers):
        return numbers[0].isdisjoint(numbers[1])
    return bool(first) and bool(second) and first.isdisjoint(second)


def list_disagreements(
    answer: str, supporting: Sequence[int], rivals: Sequence[tuple[str, int]], documents: Sequence[Document],
    ids: Sequence[str],
) -> tuple[Disagreement, ...]:  # fmt: skip
    """Return the answers of passages that disagree, the newest first; of equal dates, the answer given first."""
    if not rivals:
        return ()
    by_text: dict[str, list[int]] = {answer: list(supporting)}
    for text, index in rivals:
        by_text.setdefault(text, []).append(index)
    sides = [
        Disagreement(text, tuple(ids[i] for i in of), max((date_of(documents[i]) for i in of), default=""))
        for text, of in by_text.items()
    ]
    return tuple(sorted(sides, key=lambda side: side.date, reverse=True))


def disagreement_warning(sides: Sequence[Disagreement], documents: Sequence[Document], ids: Sequence[str]) -> str:
    """Return what each side answers, with its sources."""
    by_id = dict(zip(ids, documents, strict=True))
    told = (
        f"{side.text.rstrip('.')} ({'; '.join(passage_name(by_id[identity]) for identity in side.document_ids)})"
        for side in sides
    )
    return f"the passages disagree: {', '.join(told)}"
