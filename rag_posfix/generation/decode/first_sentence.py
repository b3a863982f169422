"""Whether an answer is still in its first sentence, token by token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A full stop needs a space after it: "3.5" and "example.org" hold none. Chinese and Japanese sentences end without.
_END = re.compile(r"[.!?\u2026](?=\s)|[\u3002\uff01\uff1f\n]")
WINDOW = 8
"""Tokens that are decoded at each step: a sentence end and the space after it are in neighbouring tokens."""


@dataclass(frozen=True, slots=True)
class FirstSentence:
    """The end of the first sentence of a growing answer. White space before the answer is no sentence.

    Attributes:
        decode: Tokens to text; None where there is no text, then the sentence never ends.
        last_tokens: The last ``WINDOW`` tokens.
        is_over: Whether a sentence has ended.
    """

    decode: Callable[[Sequence[int]], str] | None = None
    last_tokens: tuple[int, ...] = ()
    is_over: bool = False

    def add(self, token: int) -> FirstSentence:
        """Return the state after one more token."""
        if self.decode is None or self.is_over:
            return self
        tokens = (*self.last_tokens, token)[-WINDOW:]
        return FirstSentence(self.decode, tokens, _END.search(self.decode(tokens).lstrip()) is not None)
