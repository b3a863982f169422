"""TREC's files of judgements and runs. Knows nothing of documents or measures."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.files import checked_id, read_lines, write_text

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> grade."""

Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score."""

_GAP = 1e-6  # several times the spacing of single precision, which trec_eval keeps scores in


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Return judgements from ``query iteration document grade`` (TREC) or ``query document grade`` (BEIR).

    BEIR's form is separated by tabs and may start with a header. A pair that is judged twice with the same grade
    counts once.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file is missing or holds nothing, a line is malformed, a grade is not an integer, or a
            pair has two grades.
    """
    qrels: dict[str, dict[str, int]] = {}
    for index, (location, line) in enumerate(read_lines(path)):
        query, document, text = _judgement(line, location)
        grade = _grade(text)
        if grade is None:
            if index == 0 and len(line.split()) == 3:  # BEIR's header
                continue
            raise EvaluationError(f"{location}: grade {text!r} is not an integer; 0 is not relevant, 1 and above are")
        judged = qrels.setdefault(checked_id(query, location, "query"), {})
        if judged.setdefault(checked_id(document, location, "document"), grade) != grade:
            raise EvaluationError(
                f"{location}: query {query!r} and document {document!r} are judged {judged[document]} and {grade}; "
                "keep one grade"
            )
    if not qrels:
        raise EvaluationError(f"{path} holds no judgements; give a TREC or BEIR qrels file")
    return qrels


def read_run(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Return the ranking of each query, best first: ``query Q0 document rank score tag``.

    The score decides and the rank column is not read, as in trec_eval: scores are compared in single precision, and
    equal ones are ordered by document id, descending.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file is missing or holds nothing, a line is malformed, a score is no finite number, or a
            query has a document twice.
    """
    found: dict[str, dict[str, float]] = {}
    for location, line in read_lines(path):
        fields = line.split(maxsplit=5)
        if len(fields) != 6:
            raise EvaluationError(f"{location} has {len(fields)} columns; a run has: query Q0 document rank score tag")
        query, document, text = fields[0], fields[2], fields[4]
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise EvaluationError(f"{location}: score {text!r} is no finite number; every document needs one")
        scores = found.setdefault(query, {})
        if document in scores:
            raise EvaluationError(
                f"{location}: document {document!r} is listed twice for query {query!r}; keep one line"
            )
        scores[document] = score
    if not found:
        raise EvaluationError(f"{path} holds no ranking; give a TREC run file")
    ranked = {}
    for query, scores in found.items():
        by_id = sorted(scores.items(), key=lambda pair: pair[0].encode(), reverse=True)
        ranked[query] = sorted(by_id, key=lambda pair: -ctypes.c_float(pair[1]).value)
    return ranked


def decreasing(scores: Sequence[float]) -> list[float]:
    """Return scores that no reader of a run can put into another order: each is below the one before.

    trec_eval orders equal scores by document id and keeps scores in single precision. A score that is not lower than
    the one before it by more than 1e-6 (relative to that one, where it is above 1) is moved down to there. So one that
    follows k ties or near ties lies up to k times 1e-6 below what was given; all others are as given, to nine digits.

    Args:
        scores: From best to worst, equal ones in the order that shall stay.
    """
    result: list[float] = []
    for score in scores:
        value = float(f"{score:.9g}")
        if result:
            below = result[-1] - _GAP * max(1.0, abs(result[-1]))
            value = min(value, float(f"{below:.9g}"))
        result.append(value)
    return result


def write_run(path: Path, run: Run, tag: str) -> None:
    """Write a run in TREC's form, queries in the order of ``run``, documents from the highest score to the lowest.

    Args:
        path: The file, written whole or not at all.
        run: Scores that differ within each query (see ``decreasing``).
        tag: Names the run; white space becomes ``-``.

    Raises:
        EvaluationError: it cannot be written.
    """
    write_text(path, _run_lines(run, "-".join(tag.split()) or "run"))


def _run_lines(run: Run, tag: str) -> Iterator[str]:
    for query, scores in run.items():
        ranked = sorted(scores.items(), key=lambda pair: -pair[1])
        for rank, (document, score) in enumerate(ranked, start=1):
            yield f"{query} Q0 {document} {rank} {score:.9g} {tag}\n"


def _judgement(line: str, location: str) -> tuple[str, str, str]:
    fields = line.split()
    if len(fields) == 4:
        return fields[0], fields[2], fields[3]
    if len(fields) == 3:
        return fields[0], fields[1], fields[2]
    raise EvaluationError(
        f"{location} has {len(fields)} columns; judgements have 'query iteration document grade' (TREC) or "
        "'query document grade' (BEIR)"
    )


def _grade(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None
