"""Finds stop strings in text that comes in pieces. Linear in the text, whatever the stop strings are."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Matches several strings at once against a growing text, one character at a time.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977), for each string.
    Cost: a constant number of steps for each character and string, on average.

    Args:
        stops: The strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # of each string, how long a beginning the text ends with
        self._length = 0

    @property
    def undecided(self) -> int:
        """How many characters at the end of the text may be the beginning of a string."""
        return max(self._matched, default=0)

    def push(self, piece: str) -> int | None:
        """Return the start of the first string in the text that ``piece`` completes, or None.

        Of strings that ``piece`` completes together, the one that starts first counts.

        Args:
            piece: The characters that follow. Nothing may be pushed after a match.
        """
        if not self._stops:
            return None
        starts = [start for i in range(len(self._stops)) if (start := self._first(i, piece)) is not None]
        self._length += len(piece)
        return min(starts, default=None)

    def _first(self, index: int, piece: str) -> int | None:
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        for at, character in enumerate(piece):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                return self._length + at + 1 - matched
        self._matched[index] = matched
        return None


def _borders(text: str) -> list[int]:
    """Return for each end the length of the longest proper beginning of ``text`` that ends there."""
    borders = [0] * len(text)
    matched = 0
    for end in range(1, len(text)):
        while matched and text[matched] != text[end]:
            matched = borders[matched - 1]
        matched += text[matched] == text[end]
        borders[end] = matched
    return borders
