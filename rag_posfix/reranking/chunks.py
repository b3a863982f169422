"""Splits a passage for a model that reads it together with a question in a window of its own. Knows its tokenizer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.errors import RerankingError

__all__ = ["Split", "split"]

SMALLEST = 8
"""Tokens of a passage that a question must leave room for."""


@dataclass(frozen=True, slots=True)
class Split:
    """A passage in pieces.

    Attributes:
        pieces: Its text, or consecutive pieces of it.
        cut: Whether the model will not see the end of the one piece.
    """

    pieces: tuple[str, ...]
    cut: bool = False

    @property
    def details(self) -> dict[str, Any]:
        """What is to be said of it in a document's metadata."""
        if len(self.pieces) > 1:
            return {"long_document": "chunked", "chunks": len(self.pieces)}
        return {"long_document": "truncated"} if self.cut else {}


def split(tokenizer: Any, question: str, text: str, window: int | None, *, chunk: bool) -> Split:
    """Return a passage in pieces that fit the window with the question; one piece if ``chunk`` is off.

    Pieces do not overlap, and end between two words where there is a space. With a tokenizer that cannot say where its
    tokens stand in the text, the passage is one piece.

    Raises:
        RerankingError: the question leaves no room.
    """
    if window is None:
        return Split((text,))
    asked = tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
    room = window - len(asked) - tokenizer.num_special_tokens_to_add(pair=True)
    if room < SMALLEST:
        raise RerankingError(
            f"the question takes {len(asked)} tokens, and the cross-encoder's window of {window} has {max(room, 0)} "
            f"left for a passage; at least {SMALLEST} are needed: shorten the question or raise max_length"
        )
    exact = bool(getattr(tokenizer, "is_fast", False))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=exact, verbose=False)
    n_tokens = len(tokens["input_ids"])
    if n_tokens <= room:
        return Split((text,))
    if not chunk or not exact:
        return Split((text,), cut=True)
    starts = [int(start) for start, _ in tokens["offset_mapping"]]
    return Split(tuple(piece for piece in _pieces(text, starts, room) if piece.strip()))


def _pieces(text: str, starts: Sequence[int], room: int) -> Iterator[str]:
    """Yield consecutive pieces of at most ``room`` tokens, which begin at ``starts``."""
    at, begun = 0, 0
    while at + room < len(starts):
        stop = starts[at + room]
        space = max(text.rfind(" ", begun + 1, stop), text.rfind("\n", begun + 1, stop))
        stop = space + 1 if space > 0 else max(stop, begun + 1)
        yield text[begun:stop]
        begun, at = stop, bisect_left(starts, stop, lo=at + 1)
    yield text[begun:]
