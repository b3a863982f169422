"""Long passages: those of a question joined in groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample


def with_joined_passages(examples: Sequence[PositionExample], count: int) -> list[PositionExample]:
    """Return the questions with passages of ``count`` passages each, their titles above them.

    A gold passage stands in the middle of ``count - 1`` distractors, the later of two middles. The other distractors
    are joined in their order; those that are left over at the end are left out.

    Raises:
        EvaluationError: ``count`` is below 2, or a question has too few distractors for one joined distractor.
    """
    if count < 2:
        raise EvaluationError(f"joined={count} must be at least 2 passages; leave it out for passages as they are")
    result = []
    for example in examples:
        taken = (count - 1) * len(example.gold)
        if len(example.distractors) < taken + count:
            raise EvaluationError(
                f"question {example.id} has {len(example.distractors)} distractors; passages of joined={count} need "
                f"{taken + count} or more"
            )
        distractors = [example.distractors[start : start + count - 1] for start in range(0, taken, count - 1)]
        gold = []
        for passage, around in zip(example.gold, distractors, strict=True):
            middle = count // 2
            gold.append(_joined((*around[:middle], passage, *around[middle:]), str(passage.id)))
        rest = example.distractors[taken : taken + (len(example.distractors) - taken) // count * count]
        groups = [rest[start : start + count] for start in range(0, len(rest), count)]
        joined = tuple(_joined(group, "+".join(str(document.id) for document in group)) for group in groups)
        result.append(replace(example, gold=tuple(gold), distractors=joined))
    return result


def _joined(documents: Sequence[Document], identity: str) -> Document:
    titled = [(document.metadata.get("title", ""), document.page_content) for document in documents]
    text = "\n\n".join(f"{title}\n{content}" if title else content for title, content in titled)
    return Document(page_content=text, id=identity)
