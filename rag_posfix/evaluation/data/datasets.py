"""Questions with one gold passage and distractors, from files on disk."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import file_digest

__all__ = ["PositionExample", "data_facts", "load_examples", "take_examples"]


@dataclass(frozen=True, slots=True)
class PositionExample:
    """A question whose gold passage can be put at any position among its distractors.

    Attributes:
        id: The number of its row in the file, or the name that the file gives it.
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
    """Read Lost-in-the-Middle rows or SQuAD articles (XQuAD is one such file); the content tells which.

    Lost in the Middle is one JSON object per line with ``question``, ``answers`` and ``ctxs``, of which one has
    ``isgold``; the other contexts are the distractors, in the order of the file.

    SQuAD is one JSON object whose ``data`` lists articles with ``paragraphs`` of one ``context`` and its ``qas``. The
    paragraph of a question is gold; its distractors are the other paragraphs of the article, then one paragraph of
    each following article in turn, around and around. Questions come one per paragraph in turn, and the paragraphs
    one per article in turn, so that the first few questions cover many articles. An answer may also stand in a
    paragraph that is not gold; no question is left out for it.

    Args:
        path: The file; compressed if its name ends in ``.gz``.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start, so that settings can be chosen on others.

    Raises:
        EvaluationError: the file is missing, or a row or a question is malformed.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is not a file; give the path of a file of questions, .gz or plain")
    text = _read(path)
    articles = _articles(text, path)
    if articles is None:
        examples = list(_rows(text, path, limit, skip))
    else:
        stop = None if limit is None else skip + limit
        examples = list(itertools.islice(_squad_examples(articles, path), skip, stop))
    if not examples:
        raise EvaluationError(f"{path} holds no rows after the first {skip}; lower skip or choose another file")
    return examples


def take_examples(data: Path | Sequence[PositionExample], limit: int | None, skip: int) -> list[PositionExample]:
    """Return the questions of a file, or those that are given, without the first ``skip`` and at most ``limit``.

    Raises:
        EvaluationError: the file is missing or malformed, or no question is left.
    """
    if isinstance(data, Path):
        return load_examples(data, limit=limit, skip=skip)
    taken = list(data[skip:] if limit is None else data[skip : skip + limit])
    if not taken:
        raise EvaluationError(f"{len(data)} questions leave none with limit={limit} and skip={skip}; give more")
    return taken


def data_facts(data: Path | Sequence[PositionExample]) -> dict[str, str | None]:
    """Return name and SHA-256 of a file, or of questions that come from none, for a record."""
    if isinstance(data, Path):
        return {"name": data.name, "sha256": file_digest(data)}
    digest = hashlib.sha256()
    for one in data:
        documents = [[d.id, d.metadata.get("title", ""), d.page_content] for d in (one.gold, *one.distractors)]
        digest.update(json.dumps([one.id, one.question, one.answers, documents]).encode())
    return {"name": None, "sha256": digest.hexdigest()}


def _read(path: Path) -> str:
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as opened
        ):
            return opened.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it must be UTF-8 text, compressed where its "
            "name ends in .gz"
        ) from error


def _articles(text: str, path: Path) -> list[Any] | None:
    """Return the articles of a file in SQuAD's format; None if its first JSON value is something else."""
    try:
        first, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return None
    if not isinstance(first, dict) or "data" not in first or "ctxs" in first:
        return None
    if not isinstance(first["data"], list):
        raise EvaluationError(f"{path}: data is {type(first['data']).__name__}, must be a list of SQuAD articles")
    return first["data"]


def _rows(text: str, path: Path, limit: int | None, skip: int) -> Iterator[PositionExample]:
    found = 0
    for number, line in enumerate(text.split("\n")):
        if limit is not None and found >= limit:
            return
        if number < skip or not line.strip():
            continue
        try:
            yield _row_example(json.loads(line), number)
        except (AttributeError, KeyError, ValueError, TypeError, StopIteration) as error:
            raise EvaluationError(
                f"{path}:{number + 1} is not a Lost-in-the-Middle row ({type(error).__name__}: {error}); it needs "
                "question, answers and ctxs with one isgold"
            ) from error
        found += 1


def _row_example(row: dict[str, Any], number: int) -> PositionExample:
    question, answers = _checked(row["question"], row["answers"])
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
        gold=documents[gold],
        distractors=tuple(d for i, d in enumerate(documents) if i != gold),
    )


def _squad_examples(articles: Sequence[Any], path: Path) -> Iterator[PositionExample]:
    """Yield the questions of SQuAD articles, spread over articles and paragraphs."""
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
            if not _visible(paragraph["context"]) or not isinstance(paragraph["qas"], list):
                raise ValueError("a paragraph has no visible context or no list of qas")
        return [
            Document(page_content=paragraph["context"], metadata={"title": title}, id=f"{number}-{p}")
            for p, paragraph in enumerate(article["paragraphs"])
        ]
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise EvaluationError(
            f"{at} is not a SQuAD article ({type(error).__name__}: {error}); it needs paragraphs with context and qas"
        ) from error


def _squad_example(
    row: Any, at: str, documents: Sequence[Sequence[Document]], article: int, paragraph: int
) -> PositionExample:
    try:
        question, answers = _checked(row["question"], [answer["text"] for answer in row["answers"]])
        name = row.get("id", at.partition(": ")[2])
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise EvaluationError(
            f"{at} is not a SQuAD question ({type(error).__name__}: {error}); it needs question and answers with text"
        ) from error
    near = [document for p, document in enumerate(documents[article]) if p != paragraph]
    others = [documents[(article + step) % len(documents)] for step in range(1, len(documents))]
    far = [document for turn in itertools.zip_longest(*others) for document in turn if document is not None]
    return PositionExample(
        id=str(name), question=question, answers=answers, gold=documents[article][paragraph],
        distractors=(*near, *far),
    )  # fmt: skip


def _checked(question: Any, answers: Any) -> tuple[str, tuple[str, ...]]:
    """Return question and answers, each answer once.

    Raises:
        ValueError: one is no visible text.
    """
    if not _visible(question):
        raise ValueError(f"question is {question!r}, must be text")
    if not isinstance(answers, list) or not answers or not all(map(_visible, answers)):
        raise ValueError(f"answers is {answers!r}, must be a list of one text or more")
    return question, tuple(dict.fromkeys(answers))


def _visible(text: object) -> bool:
    return isinstance(text, str) and bool(text.strip())
