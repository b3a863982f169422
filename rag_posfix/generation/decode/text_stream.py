"""Turns tokens into text as they come: whole characters only, and nothing that may become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rag_posfix.generation.decode.stop_matcher import StopMatcher

REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes one answer incrementally.

    Args:
        decode: Tokens to text, special tokens left out.
        stop: Strings that end the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._matcher = StopMatcher(stop)
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
        new = window[self._seen :]
        # Keep a few tokens of context: some tokenizers write a word differently at the start of a text.
        self._window = max(self._window, len(self._ids) - 4)
        self._seen = len(self._decode(self._ids[self._window :]))
        return self._emit(new, hold_back=True)

    def finish(self) -> str:
        """Return what was held back. Call once, at the end."""
        rest = "" if self.stopped else self._decode(self._ids[self._window :])[self._seen :]
        return self._emit(rest, hold_back=False)

    def _emit(self, new: str, hold_back: bool) -> str:
        self.text += new
        found = None if self.stopped else self._matcher.push(new)
        if found is not None:
            self.text = self.text[:found]
            self.stopped = True
        end = len(self.text) - (self._matcher.undecided if hold_back and not self.stopped else 0)
        certain = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return certain
