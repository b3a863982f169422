"""Splits text into passages with exact character offsets. Pure functions; knows nothing of files or documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rag_posfix.errors import ConfigError

# Tried in turn on a piece that is too long: breaks between paragraphs, then sentences and lines, then words.
_BREAKS = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"(?<=[.!?…])[\"')\]”’»]*\s+|(?<=[。！？])\s*|\n\s*"),  # noqa: RUF001 - CJK and typographic marks
    re.compile(r"\s+"),
)


@dataclass(frozen=True, slots=True)
class CharSpan:
    """Characters ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PassageSize:
    """Upper limits of a passage's length.

    Args:
        words: Maximum number of words; about 150 fit into the 256 tokens that small embedding models read.
        characters: Maximum number of characters, for text whose words are long or not separated by spaces.

    Raises:
        ConfigError: a value is below 1.
    """

    words: int = 150
    characters: int = 1000

    def __post_init__(self) -> None:
        for name, value in (("words", self.words), ("characters", self.characters)):
            if value < 1:
                raise ConfigError(f"passage size: {name}={value} must be >= 1")


def split_passages(text: str, size: PassageSize | None = None) -> list[CharSpan]:
    """Return the passages of ``text``, in order.

    Consecutive paragraphs are joined while they fit; a paragraph that does not fit is split between sentences, then
    between words, then anywhere. Passages do not overlap and start and end with a visible character. Only white space
    is left out.

    Args:
        size: Limits of a passage; the defaults of PassageSize if None.
    """
    size = size or PassageSize()
    passages: list[CharSpan] = []
    words_so_far = 0
    for piece in _pieces(text, CharSpan(0, len(text)), size, 0):
        words = len(text[piece.start : piece.end].split())
        last = passages[-1] if passages else None
        if last and words_so_far + words <= size.words and piece.end - last.start <= size.characters:
            passages[-1] = CharSpan(last.start, piece.end)
            words_so_far += words
        else:
            passages.append(piece)
            words_so_far = words
    return passages


def _pieces(text: str, span: CharSpan, size: PassageSize, level: int) -> Iterator[CharSpan]:
    """Yield consecutive parts of ``span`` that fit, as large as the breaks allow."""
    span = _strip(text, span)
    length = span.end - span.start
    if length == 0:
        return
    if length <= size.characters and len(text[span.start : span.end].split()) <= size.words:
        yield span
    elif level == len(_BREAKS):
        for start in range(span.start, span.end, size.characters):
            yield CharSpan(start, min(start + size.characters, span.end))
    else:
        start = span.start
        for match in _BREAKS[level].finditer(text, span.start, span.end):
            yield from _pieces(text, CharSpan(start, match.end()), size, level + 1)
            start = match.end()
        yield from _pieces(text, CharSpan(start, span.end), size, level + 1)


def _strip(text: str, span: CharSpan) -> CharSpan:
    """Return ``span`` without white space at both ends. The text is not copied."""
    start, end = span.start, span.end
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return CharSpan(start, end)
