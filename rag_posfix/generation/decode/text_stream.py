"""Turns tokens into text as they come: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes one answer incrementally.

    Args:
        decode: Tokens to text, special tokens left out.
        stop: Strings that end the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window = 0  # tokens before it are never decoded again
        self._seen = 0  # characters of the window's text that are in `text` already
        self._emitted = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now; check ``stopped`` afterwards."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._window :])
        if window.endswith(REPLACEMENT):  # half a character: wait for the rest
            return ""
        self.text += window[self._seen :]
        # Keep a few tokens of context: some tokenizers write a word differently at the start of a text.
        self._window = max(self._window, len(self._ids) - 4)
        self._seen = len(self._decode(self._ids[self._window :]))
        return self._emit(hold_back=True)

    def finish(self) -> str:
        """Return what was held back. Call once, at the end."""
        if not self.stopped:
            self.text += self._decode(self._ids[self._window :])[self._seen :]
        return self._emit(hold_back=False)

    def _emit(self, hold_back: bool) -> str:
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
            hold_back = False
        end = len(self.text) - (self._undecided() if hold_back else 0)
        new = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new

    def _undecided(self) -> int:
        """Return how many trailing characters are the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0
