"""Identifiers of requests and responses: unique, and not secret."""

from __future__ import annotations

import itertools
import uuid


class Identifiers:
    """Makes identifiers of 32 hexadecimal digits: 16 random ones of this object, and a count.

    A random identifier for each request would cost a system call, during which another thread takes the interpreter's
    lock: the request then waits until that thread gives it back.
    """

    def __init__(self) -> None:
        self._start = uuid.uuid4().hex[:16]
        self._count = itertools.count(1)

    def new(self) -> str:
        """Return an identifier that no other call returned. Safe to call from any thread."""
        return f"{self._start}{next(self._count):016x}"
