"""TREC files line by line: judgements, runs, and documents and topics in markup; errors name ``file:line``."""

from __future__ import annotations

import ctypes
import gzip
import html
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.questions import unreadable
from rag_posfix.evaluation.record import write_whole
from rag_posfix.text import clean_text

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> document id -> grade."""

Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score."""

_GAP = 1e-6  # several times the spacing of single precision, which trec_eval keeps scores in
_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_TOPIC = re.compile(r"<topic\b[^>]*number\s*=\s*[\"']([^\"']+)[\"']", re.IGNORECASE)
_NUMBER = re.compile(r"<num>\s*(?:number\s*:)?\s*([^\s<]+)", re.IGNORECASE)
_TITLE = re.compile(r"<(?:title|query)\b[^>]*>(.*?)(?=<|\Z)", re.IGNORECASE | re.DOTALL)


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (location, line) of every line with visible characters; a location reads ``file:number``.

    The file is UTF-8 text, compressed where its name ends in ``.gz``; a byte order mark is passed over.
    """
    if not path.is_file():
        raise EvaluationError(f"{path} is not a file; give the path of a file, .gz or plain")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def write_text(path: Path, texts: Iterable[str | bytes]) -> None:
    """Write a file (text as UTF-8) completely or not at all, replacing one that is there."""
    write_whole(path, (text.encode() if isinstance(text, str) else text for text in texts))


def checked_id(value: object, location: str, what: str) -> str:
    """Return an id that TREC files can hold: text without white space; integers become text."""
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or not name:
        raise EvaluationError(f"{location}: {what} without an id (found {value!r}); give each an id, text or integer")
    if name.split() != [name] or "\0" in name:
        raise EvaluationError(f"{location}: {what} id {name!r} holds white space, which TREC files cannot; rename it")
    return name


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Return judgements from ``query iteration document grade`` (TREC) or ``query document grade`` (BEIR).

    BEIR's form is separated by tabs and may start with a header. A pair that is judged twice with the same grade
    counts once.
    """
    qrels: dict[str, dict[str, int]] = {}
    for index, (location, line) in enumerate(read_lines(path)):
        columns = line.split()
        if len(columns) not in (3, 4):
            raise EvaluationError(
                f"{location} has {len(columns)} columns; judgements have 'query iteration document grade' (TREC) or "
                "'query document grade' (BEIR)"
            )
        query, document, text = columns[0], *columns[-2:]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not value.is_integer():  # neither a fraction nor infinite
            if index == 0 and len(columns) == 3:  # BEIR's header
                continue
            raise EvaluationError(f"{location}: grade {text!r} is not an integer; 0 is not relevant, 1 and above are")
        grades = qrels.setdefault(checked_id(query, location, "query"), {})
        if grades.setdefault(checked_id(document, location, "document"), int(value)) != value:
            raise EvaluationError(
                f"{location}: query {query!r} and document {document!r} are judged {grades[document]} and "
                f"{int(value)}; keep one grade"
            )
    if not qrels:
        raise EvaluationError(f"{path} holds no judgements; give a TREC or BEIR qrels file")
    return qrels


def read_run(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Return the ranking of each query, best first: ``query Q0 document rank score tag``.

    The score decides and the rank column is not read, as in trec_eval: scores are compared in single precision, and
    equal ones are ordered by document id, descending.
    """
    run: dict[str, dict[str, float]] = {}
    for location, line in read_lines(path):
        columns = line.split(maxsplit=5)
        if len(columns) != 6:
            raise EvaluationError(
                f"{location} has {len(columns)} columns; a run has: query Q0 document rank score tag"
            )
        query, document, text = columns[0], columns[2], columns[4]
        try:
            score = float(text)
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise EvaluationError(f"{location}: score {text!r} must be a finite number; give each document one")
        scores = run.setdefault(query, {})
        if document in scores:
            raise EvaluationError(
                f"{location}: document {document!r} is listed twice for query {query!r}; keep one line"
            )
        scores[document] = score
    if not run:
        raise EvaluationError(f"{path} holds no ranking; give a TREC run file")
    ranked = {}
    for query, scores in run.items():
        by_id = sorted(scores.items(), key=lambda pair: pair[0].encode(), reverse=True)
        ranked[query] = sorted(by_id, key=lambda pair: -ctypes.c_float(pair[1]).value)
    return ranked


def decreasing(scores: Sequence[float]) -> list[float]:
    """Return scores that no reader of a run can put into another order: each is below the one before.

    trec_eval orders equal scores by document id and keeps scores in single precision. A score that is not lower than
    the one before it by more than 1e-6 (relative to that one, where it is above 1) is moved down to there. So one that
    follows k ties or near ties lies up to k times 1e-6 below its input; all other scores keep nine digits of theirs.

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
        run: Scores that differ within each query (see ``decreasing``).
        tag: Names the run; white space becomes ``-``.
    """
    name = "-".join(tag.split()) or "run"
    write_text(
        path,
        (
            f"{query} Q0 {document} {rank} {score:.9g} {name}\n"
            for query, scores in run.items()
            for rank, (document, score) in enumerate(sorted(scores.items(), key=lambda pair: -pair[1]), start=1)
        ),
    )


def read_markup_documents(path: Path) -> Iterator[tuple[str, str | None, str, str]]:
    """Yield (location, id, title, text) of each ``<DOC>``; None is a missing id.

    The id is ``<DOCNO>``, the title ``<TITLE>`` or ``<HEADLINE>``, the text the content of ``<TEXT>``, or all other
    content where there is no such element. Tags are left out and entities are read.
    """
    for location, block in _blocks(path, "doc"):
        texts = re.findall(r"<text\b[^>]*>(.*?)</text>", block, re.IGNORECASE | re.DOTALL)
        if not texts:
            names = r"docno|docid|title|headline|dochdr"
            texts = [re.sub(rf"<({names})\b[^>]*>.*?</\1>", " ", block, flags=re.IGNORECASE | re.DOTALL)]
        title = _element(block, "title") or _element(block, "headline") or ""
        yield location, _element(block, "docno"), title, _plain("\n".join(texts))


def read_markup_topics(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield (location, id, question) of each ``<top>`` or ``<topic>``; the question is ``<title>`` or ``<query>``."""
    for location, block in _blocks(path, "top(?:ic)?"):
        number = _TOPIC.search(block) or _NUMBER.search(block)
        title = _TITLE.search(block)
        question = re.sub(r"^\s*topic\s*:", "", title[1], flags=re.IGNORECASE) if title else ""
        yield location, number[1].strip() if number else None, _plain(question)


def _blocks(path: Path, name: str) -> Iterator[tuple[str, str]]:
    opening = re.compile(rf"<{name}(\s[^>]*)?>", re.IGNORECASE)
    closing = re.compile(rf"</{name}>", re.IGNORECASE)
    lines: list[str] = []
    start = ""
    for location, line in read_lines(path):
        for part in closing.sub(r"\g<0>\n", line).split("\n"):
            if not lines and opening.search(part):
                start = location
            if start:
                lines.append(part)
                if closing.search(part):
                    yield start, "\n".join(lines)
                    lines, start = [], ""
    if start:
        raise EvaluationError(f"{start}: no closing tag before the end of the file; is the file cut off?")


def _element(block: str, name: str) -> str | None:
    match = re.search(rf"<{name}\b[^>]*>(.*?)</{name}>", block, re.IGNORECASE | re.DOTALL)
    return _plain(match[1]) if match else None


def _plain(text: str) -> str:
    # The outermost element's own tags go with all others.
    return clean_text(" ".join(html.unescape(_TAG.sub(" ", text)).split()))
