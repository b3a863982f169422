"""Logs the beginning and the end of an outage of a store. Stored values are never logged."""

from __future__ import annotations

import logging
import threading

_logger = logging.getLogger(__name__)


class Health:
    """The state of a store, so that an outage is logged once and not for each request.

    Args:
        label: Name of the store in the log, without a password.
    """

    def __init__(self, label: str, cache: str) -> None:
        self._label = label
        self._cache = cache
        self._lock = threading.Lock()
        self._failing = False

    def failed(self, error: BaseException) -> None:
        """Report a failure. Only the type of the error is logged, because its text may quote stored values."""
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
