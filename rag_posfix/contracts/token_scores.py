"""Tokens with their log-probabilities, as generators return them. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass

LEAST = -9999.0
"""Log-probabilities are at least this, as in OpenAI's API: JSON has no infinity."""

MOST_ALTERNATIVES = 20
"""Alternatives of a token that a request may ask for."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token and its log-probability.

    Attributes:
        data: The bytes of the token; they need not be complete characters.
        log_prob: Natural logarithm of its probability, at least ``LEAST``; None for the first token of a prompt.
    """

    data: bytes
    log_prob: float | None

    @property
    def text(self) -> str | None:
        """The text of the token, or None if its bytes are no complete characters."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer or a prompt, with the tokens that were likeliest in its place.

    Attributes:
        token: The token.
        start: Characters of the answer (or the prompt) before it. The token that ends an answer, and tokens of a stop
            string, start at the end of the answer's text or later.
        top: The likeliest tokens, best first.
    """

    token: TokenScore
    start: int
    top: tuple[TokenScore, ...] = ()
