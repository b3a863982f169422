"""Questions in SQuAD's format: the paragraph of a question is gold, the others are its distractors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.files import malformed
from rag_posfix.evaluation.data.position_example import PositionExample, question_and_answers, visible


def squad_articles(text: str, path: Path) -> list[Any] | None:
    """Return the articles of a file in SQuAD's format; None if its first JSON value is something else."""
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return None
    if not isinstance(first, dict) or "data" not in first or "ctxs" in first:
        return None
    if not isinstance(first["data"], list):
        raise EvaluationError(f"{path}: data must be a list of SQuAD articles, is no list")
    return first["data"]


def squad_examples(articles: Sequence[Any], path: Path) -> Iterator[PositionExample]:
    """Yield the questions of SQuAD articles, spread over articles and paragraphs.

    The paragraph of a question is gold; its distractors are the other paragraphs of the article, then one paragraph of
    each following article in turn, around and around. Questions come one per paragraph in turn, and the paragraphs
    one per article in turn, so that the first few questions cover many articles. An answer may also stand in a
    paragraph that is not gold; no question is left out for it.

    Raises:
        EvaluationError: an article or a question is malformed.
    """
    documents = [_paragraphs(article, f"{path}: data[{a}]", a) for a, article in enumerate(articles)]
    most = max(map(len, documents), default=0)
    spread = [(a, p) for p in range(most) for a in range(len(documents)) if p < len(documents[a])]
    for q in itertools.count():
        asked = [(a, p) for a, p in spread if q < len(articles[a]["paragraphs"][p]["qas"])]
        if not asked:
            return
        for a, p in asked:
            at = f"{path}: data[{a}].paragraphs[{p}].qas[{q}]"
            yield _squad_example(articles[a]["paragraphs"][p]["qas"][q], at, documents, a, p)


def _paragraphs(article: Any, at: str, number: int) -> list[Document]:
    try:
        title = " ".join(str(article.get("title", "")).replace("_", " ").split())
        for paragraph in article["paragraphs"]:
            if not visible(paragraph["context"]) or not isinstance(paragraph["qas"], list):
                raise ValueError("a paragraph has no visible context or no list of qas")
        return [
            Document(page_content=paragraph["context"], metadata={"title": title}, id=f"{number}-{p}")
            for p, paragraph in enumerate(article["paragraphs"])
        ]
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise EvaluationError(
            f"{at} is not a SQuAD article ({malformed(error)}); it needs paragraphs with context and qas"
        ) from error


def _squad_example(
    row: Any, at: str, documents: Sequence[Sequence[Document]], article: int, paragraph: int
) -> PositionExample:
    try:
        question, answers = question_and_answers(row["question"], [answer["text"] for answer in row["answers"]])
        name = row.get("id", at.partition(": ")[2])
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise EvaluationError(
            f"{at} is not a SQuAD question ({malformed(error)}); it needs question and answers with text"
        ) from error
    near = [document for p, document in enumerate(documents[article]) if p != paragraph]
    others = [documents[(article + step) % len(documents)] for step in range(1, len(documents))]
    far = [document for turn in itertools.zip_longest(*others) for document in turn if document is not None]
    return PositionExample(
        id=str(name), question=question, answers=answers, gold=(documents[article][paragraph],),
        distractors=(*near, *far),
    )  # fmt: skip
