"""Documents and topics in TREC's markup: ``<DOC>``, ``<top>`` and ``<topic>``."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.data.files import read_lines
from rag_posfix.text import clean_text

_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_TOPIC = re.compile(r"<topic\b[^>]*number\s*=\s*[\"']([^\"']+)[\"']", re.IGNORECASE)
_NUMBER = re.compile(r"<num>\s*(?:number\s*:)?\s*([^\s<]+)", re.IGNORECASE)
_TITLE = re.compile(r"<(?:title|query)\b[^>]*>(.*?)(?=<|\Z)", re.IGNORECASE | re.DOTALL)


def read_markup_documents(path: Path) -> Iterator[tuple[str, str | None, str, str]]:
    """Yield (location, id, title, text) of each ``<DOC>``.

    The id is ``<DOCNO>``, the title ``<TITLE>`` or ``<HEADLINE>``, the text what stands in ``<TEXT>``, or all other
    content where there is no such element. Tags are left out and entities are read. None is a missing id.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file cannot be read, or a document does not end.
    """
    for location, block in _blocks(path, "doc"):
        number = _element(block, "docno")
        title = _element(block, "title") or _element(block, "headline") or ""
        texts = re.findall(r"<text\b[^>]*>(.*?)</text>", block, re.IGNORECASE | re.DOTALL)
        if not texts:
            names = r"docno|docid|title|headline|dochdr"
            texts = [re.sub(rf"<({names})\b[^>]*>.*?</\1>", " ", block, flags=re.IGNORECASE | re.DOTALL)]
        yield location, number, title, _plain("\n".join(texts))


def read_markup_topics(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield (location, id, question) of each ``<top>`` or ``<topic>``; the question is ``<title>`` or ``<query>``.

    Args:
        path: The file; compressed if its name ends in ``.gz``.

    Raises:
        EvaluationError: the file cannot be read, or a topic does not end.
    """
    for location, block in _blocks(path, "top(?:ic)?"):
        number = _TOPIC.search(block) or _NUMBER.search(block)
        title = _TITLE.search(block)
        question = re.sub(r"^\s*topic\s*:", "", title[1], flags=re.IGNORECASE) if title else ""
        yield location, number[1].strip() if number else None, _plain(question)


def _blocks(path: Path, name: str) -> Iterator[tuple[str, str]]:
    opening = re.compile(rf"<{name}(\s[^>]*)?>", re.IGNORECASE)
    closing = re.compile(rf"</{name}>", re.IGNORECASE)
    lines: list[str] = []
    began = ""
    for location, line in read_lines(path):
        if not lines and opening.search(line):
            began = location
        if began:
            lines.append(line)
            if closing.search(line):
                yield began, "\n".join(lines)
                lines, began = [], ""
    if began:
        raise EvaluationError(f"{began}: no closing tag before the end of the file; is the file cut off?")


def _element(block: str, name: str) -> str | None:
    found = re.search(rf"<{name}\b[^>]*>(.*?)</{name}>", block, re.IGNORECASE | re.DOTALL)
    return _plain(found[1]) if found else None


def _plain(text: str) -> str:
    # The outermost element's own tags go with all others.
    return clean_text(" ".join(html.unescape(_TAG.sub(" ", text)).split()))
