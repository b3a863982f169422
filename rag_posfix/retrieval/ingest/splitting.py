"""Long text to passages with exact offsets. Pure functions; knows nothing of files or documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rag_posfix.errors import ConfigError

__all__ = ["PassageSize", "Span", "split_passages"]

# Tried in turn on a piece that is too long: paragraphs, then sentences and lines, then words.
_BREAKS = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"(?<=[.!?…])[\"')\]”’»]*\s+|(?<=[。！？])\s*|\n\s*"),  # noqa: RUF001 - CJK and typographic marks
    re.compile(r"\s+"),
)


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` (exclusive) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PassageSize:
    """How long a passage may grow.

    Args:
        words: Most words; about 150 fit the 256 tokens that small embedding models read.
        characters: Most characters, for text whose words are long or not separated by spaces.

    Raises:
        ConfigError: a value is below 1.
    """

    words: int = 150
    characters: int = 1000

    def __post_init__(self) -> None:
        for name, value in (("words", self.words), ("characters", self.characters)):
            if value < 1:
                raise ConfigError(f"passage size: {name}={value} must be >= 1")


def split_passages(text: str, size: PassageSize | None = None) -> list[Span]:
    """Return the passages of ``text``, in order.

    Neighbouring paragraphs are joined while they fit; a paragraph that does not fit is broken at sentences, then
    at words, then anywhere. Passages do not overlap, start and end with a visible character, and only whitespace
    lies outside of them.

    Args:
        text: Any text.
        size: Bounds of a passage; the defaults of PassageSize if None.
    """
    size = size or PassageSize()
    passages: list[Span] = []
    words_so_far = 0
    for piece in _pieces(text, Span(0, len(text)), size, 0):
        words = len(text[piece.start : piece.end].split())
        last = passages[-1] if passages else None
        if last and words_so_far + words <= size.words and piece.end - last.start <= size.characters:
            passages[-1] = Span(last.start, piece.end)
            words_so_far += words
        else:
            passages.append(piece)
            words_so_far = words
    return passages


def _pieces(text: str, span: Span, size: PassageSize, level: int) -> Iterator[Span]:
    """Yield parts of ``span`` that each fit, as large as the breaks allow."""
    span = _strip(text, span)
    length = span.end - span.start
    if length == 0:
        return
    if length <= size.characters and len(text[span.start : span.end].split()) <= size.words:
        yield span
    elif level == len(_BREAKS):
        for start in range(span.start, span.end, size.characters):
            yield Span(start, min(start + size.characters, span.end))
    else:
        start = span.start
        for match in _BREAKS[level].finditer(text, span.start, span.end):
            yield from _pieces(text, Span(start, match.end()), size, level + 1)
            start = match.end()
        yield from _pieces(text, Span(start, span.end), size, level + 1)


def _strip(text: str, span: Span) -> Span:
    """Shrink ``span`` to its visible characters without copying the text."""
    start, end = span.start, span.end
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return Span(start, end)
