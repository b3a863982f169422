"""Logs once that a store began to fail and once that it works again. What was stored is never logged."""

from __future__ import annotations

import logging
import threading

__all__ = ["Health"]

_logger = logging.getLogger(__name__)


class Health:
    """Remembers whether a store works, so that an outage is one line in the log and not one per request.

    Args:
        label: What the log calls the store, without a password.
        cache: The cache that the store belongs to.
    """

    def __init__(self, label: str, cache: str) -> None:
        self._label = label
        self._cache = cache
        self._lock = threading.Lock()
        self._failing = False

    def failed(self, error: BaseException) -> None:
        """Report a failure. Only the type of the error is logged: its text may quote what was sent or stored."""
        with self._lock:
            changed, self._failing = not self._failing, True
        if changed:
            _logger.warning(
                "%s: %s is failing (%s); answering without it", self._cache, self._label, type(error).__name__
            )

    def worked(self) -> None:
        """Report a success."""
        with self._lock:
            changed, self._failing = self._failing, False
        if changed:
            _logger.warning("%s: %s works again", self._cache, self._label)
