"""How much each key may do: requests per minute as a token bucket, and requests at the same time. Per process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rag_posfix.errors import OverloadedError
from rag_posfix_api.keys.records import Caller

__all__ = ["QuotaError", "Quotas"]


class QuotaError(OverloadedError):
    """A key has used up what it may do now."""


@dataclass(slots=True)
class _Use:
    tokens: float
    counted_at: float
    running: int = 0


class Quotas:
    """Counts what each key does. Safe to use from any thread.

    A key with ``requests_per_minute`` = n may make n requests at once, and gains one every 60 / n seconds.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self._lock = threading.Lock()

    @contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """Count a request while the block runs.

        Args:
            caller: Who asks; a caller without limits is not counted.

        Raises:
            QuotaError: a limit of the caller's key is reached.
        """
        if caller.key_id is None or (caller.requests_per_minute is None and caller.max_concurrent is None):
            yield
            return
        use = self._take(caller, caller.key_id)
        try:
            yield
        finally:
            with self._lock:
                use.running -= 1

    def _take(self, caller: Caller, key_id: str) -> _Use:
        rate, most = caller.requests_per_minute, caller.max_concurrent
        now = self._clock()
        with self._lock:
            use = self._uses.setdefault(key_id, _Use(float(rate or 0), now))
            if most is not None and use.running >= most:
                raise QuotaError(
                    f"{use.running} requests of this key are running and {most} are allowed; wait until one ends", 1
                )
            if rate is not None:
                use.tokens = min(float(rate), use.tokens + (now - use.counted_at) * rate / 60)
                use.counted_at = now
                if use.tokens < 1:
                    seconds = math.ceil((1 - use.tokens) * 60 / rate)
                    raise QuotaError(
                        f"this key may make {rate} requests a minute; try again in {seconds} seconds", max(1, seconds)
                    )
                use.tokens -= 1
            use.running += 1
            return use
