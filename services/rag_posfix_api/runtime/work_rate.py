"""How fast the model finishes work, measured: the base of the header ``Retry-After``. Not safe for several threads."""

from __future__ import annotations

import time
from collections.abc import Callable

_HALF_LIFE_SECONDS = 60.0


class WorkRate:
    """Tokens of finished requests for each second in which the model worked.

    A request counts with the tokens that it reserved, prompt and longest answer. The tokens that wait are counted in
    the same way, so that the quotient of both is a time. Formula: sum of tokens / sum of busy seconds, where both sums
    halve with every minute of work: a rate of an hour ago says little.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._busy_seconds = 0.0
        self._busy_since: float | None = None

    def begins(self) -> None:
        """Note that the model works from now on; it may do so already."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    def finished(self, tokens: int, *, idle: bool) -> None:
        """Count a request that leaves the model.

        Args:
            idle: Whether no other request works.
        """
        now = self._clock()
        seconds = 0.0 if self._busy_since is None else now - self._busy_since
        kept = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._tokens = self._tokens * kept + tokens
        self._busy_seconds = self._busy_seconds * kept + seconds
        self._busy_since = None if idle else now

    def seconds_for(self, tokens: float) -> float | None:
        """Return how long the model takes for so many tokens; None before the first request has ended."""
        if self._tokens <= 0:
            return None
        return tokens * self._busy_seconds / self._tokens
