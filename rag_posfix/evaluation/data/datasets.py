"""Questions with gold passages and distractors, from files on disk."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.files import malformed
from rag_posfix.evaluation.data.hotpotqa import hotpotqa_example
from rag_posfix.evaluation.data.lost_in_the_middle import lost_in_the_middle_example
from rag_posfix.evaluation.data.position_example import PositionExample
from rag_posfix.evaluation.data.squad import squad_articles, squad_examples
from rag_posfix.evaluation.record import file_digest

__all__ = ["data_facts", "load_examples", "take_examples"]


def load_examples(path: Path, limit: int | None = None, skip: int = 0) -> list[PositionExample]:
    """Read Lost-in-the-Middle rows, HotpotQA rows or SQuAD articles (XQuAD is one such file); the content tells which.

    Lost in the Middle is one JSON object per line with ``question``, ``answers`` and ``ctxs``, of which one has
    ``isgold``; the other contexts are the distractors, in the order of the file. HotpotQA is one JSON object per line
    with ``question``, ``answer``, ``supporting_facts`` and ``context``; two paragraphs are gold. SQuAD is one JSON
    object whose ``data`` lists articles (``squad_examples`` says which questions come first).

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
    articles = squad_articles(text, path)
    if articles is None:
        examples = list(_rows(text, path, limit, skip))
    else:
        stop = None if limit is None else skip + limit
        examples = list(itertools.islice(squad_examples(articles, path), skip, stop))
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
        documents = [[d.id, d.metadata.get("title", ""), d.page_content] for d in (*one.gold, *one.distractors)]
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


def _rows(text: str, path: Path, limit: int | None, skip: int) -> Iterator[PositionExample]:
    found = 0
    for number, line in enumerate(text.split("\n")):
        if limit is not None and found >= limit:
            return
        if number < skip or not line.strip():
            continue
        try:
            row = json.loads(line)
            yield (hotpotqa_example if "supporting_facts" in row else lost_in_the_middle_example)(row, number)
        except (AttributeError, KeyError, ValueError, TypeError, StopIteration) as error:
            raise EvaluationError(
                f"{path}:{number + 1} is not a Lost-in-the-Middle row ({malformed(error)}); it needs "
                "question, answers and ctxs with one isgold, or as a HotpotQA row question, answer, supporting_facts "
                "and context"
            ) from error
        found += 1
