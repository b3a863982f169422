"""Headings of a PDF file without an outline: lines in larger letters than most of the text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rag_posfix.retrieval.ingest.blocks import is_heading_text

_LARGER = 1.15
"""How many times larger than most of the text a heading is, at least: 11 to 13 points, 12 to 14."""

_MAX_WORDS = 15
_MAX_SHARE = 0.25
"""Larger letters in more than this share of the characters are no headings: slides, forms, posters."""

_MAX_LEVELS = 4
_SENTENCE_ENDS = (".", ",", ";", ":")


class PdfLines:
    """The lines of a PDF file with the height of their letters, collected while pypdf extracts its text."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, float, int]] = []  # text, height in points, page index

    def visitor(self, page: int) -> Callable[..., None]:
        """Return the ``visitor_text`` of a page."""

        def visit(text: str, cm: Sequence[float], tm: Sequence[float], _font: Any, size: float) -> None:
            height = round(abs(size) * math.hypot(tm[2], tm[3]) * math.hypot(cm[2], cm[3]), 1)
            for line in filter(None, (" ".join(part.split()) for part in text.split("\n"))):
                self._lines.append((line, height, page))

        return visit

    def headings(self) -> list[tuple[str, int, int | None]]:
        """Return title, level and page index of each heading; the largest letters are level 1.

        Formula: a heading is at least ``_LARGER`` times as high as the height with the most characters, has at most
        ``_MAX_WORDS`` words and ends without a mark of a sentence. There are none if more than ``_MAX_SHARE`` of the
        characters were in headings.
        """
        characters: Counter[float] = Counter()
        for line, height, _ in self._lines:
            characters[height] += len(line)
        body = max(characters, key=lambda height: (characters[height], -height), default=0.0)
        headings = [entry for entry in self._lines if body and entry[1] >= _LARGER * body and _is_title(entry[0])]
        if sum(len(line) for line, _, _ in headings) > _MAX_SHARE * characters.total():
            return []
        heights = sorted({height for _, height, _ in headings}, reverse=True)
        return [(line, min(heights.index(height) + 1, _MAX_LEVELS), page) for line, height, page in headings]


def _is_title(line: str) -> bool:
    words = line.split()
    return (
        is_heading_text(line)
        and len(words) <= _MAX_WORDS
        and any(character.isalpha() for character in line)
        and not line.endswith(_SENTENCE_ENDS)
    )
