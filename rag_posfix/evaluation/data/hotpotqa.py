"""HotpotQA rows in the distractor setting: a question that needs two gold paragraphs among eight distractors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.documents import Document

from rag_posfix.evaluation.data.position_example import PositionExample, question_and_answers


def hotpotqa_example(row: Mapping[str, Any], number: int) -> PositionExample:
    """Return the question of a row with ``question``, ``answer``, ``supporting_facts`` and ``context``.

    Source: Yang et al. (2018), HotpotQA, section 3, https://arxiv.org/abs/1809.09600
    The paragraphs whose titles the supporting facts name are gold, in the order of the context. Sentences of a
    paragraph are joined as they are, since they carry their spaces.

    Args:
        number: Its number in the file, for rows without ``id``.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the row is malformed.
    """
    question, answers = question_and_answers(row["question"], [row["answer"]])
    needed = {title for title, _ in row["supporting_facts"]}
    documents = [
        Document(page_content="".join(sentences).strip(), metadata={"title": title}, id=f"{number}-{i}")
        for i, (title, sentences) in enumerate(row["context"])
    ]
    gold = tuple(one for one in documents if one.metadata["title"] in needed)
    if not needed or len(gold) != len(needed):
        raise ValueError(f"supporting_facts name {len(needed)} titles, of which the context has {len(gold)}")
    return PositionExample(
        id=str(row.get("id", number)),
        question=question.strip(),
        answers=answers,
        gold=gold,
        distractors=tuple(one for one in documents if one.metadata["title"] not in needed),
    )
