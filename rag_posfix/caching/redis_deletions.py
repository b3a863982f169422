"""The log of deletions in Redis: one stream without a time to live, so that no ``volatile-`` policy evicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from rag_posfix.caching.deletions import Deletion, DeletionStore, position_of, position_parts
from rag_posfix.caching.redis_client import is_rejection

_PAGE: Final = 1000
_T = TypeVar("_T")
_TRIMMED: Final = 100  # entries per call


class LogCaller(Protocol):
    """The Redis tier, as far as the log of deletions uses it."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def wait_seconds(self) -> float: ...

    def call_log(self, operation: Callable[[Any], _T]) -> _T | None:
        """Run an operation on a client within a time limit; return None if Redis fails."""
        ...


class RedisDeletions(DeletionStore):
    """A stream of deleted tags in Redis 5 or later. Redis numbers its entries in the order in which it took them."""

    def __init__(self, key: str, tier: LogCaller) -> None:
        self._key = key
        self._tier = tier
        self._offsets: dict[int, int] = {}  # position: of the replication stream after the entry was written

    @property
    def is_closed(self) -> bool:
        return self._tier.is_closed

    @property
    def wait_seconds(self) -> float:
        return self._tier.wait_seconds

    def read(self, start: int) -> Sequence[Deletion] | None:
        def read(client: Any) -> list[Deletion]:
            deletions: list[Deletion] = []
            first = _identifier(start)
            while True:
                page = client.xrange(self._key, first, "+", count=_PAGE)
                deletions += [_deletion(identifier, fields) for identifier, fields in page]
                if len(page) < _PAGE:
                    return deletions
                milliseconds, sequence = position_parts(deletions[-1].position)
                first = f"{milliseconds}-{sequence + 1}"

        return self._tier.call_log(read)

    def append(self, tags: Sequence[str], above: int, *, starts_log: bool = False) -> int | None:
        fields = {b"tags": " ".join(tags).encode()} | ({b"first": b"1"} if starts_log else {})

        def append(client: Any) -> int:
            position = _position(client.xadd(self._key, fields))
            if position <= above:  # the clock of a new master is behind
                position = _position(client.xadd(self._key, fields, id=_identifier(above + 1)))
            if (replication := _replication(client)) is not None:
                self._offsets[position] = replication[0]
            return position

        return self._tier.call_log(append)

    def holds(self, position: int) -> bool | None:
        def holds(client: Any) -> bool:
            identifier = _identifier(position)
            if not client.xrange(self._key, identifier, identifier):
                return False
            offset, replication = self._offsets.get(position), _replication(client)
            return offset is None or not replication or not replication[1] or max(replication[1]) >= offset

        result = self._tier.call_log(holds)
        if result is not None:
            self._offsets.pop(position, None)
        return result

    def trim(self, before: int) -> None:
        def trim(client: Any) -> int:
            # The last of the old entries stays: other processes may have read the log up to it and no further.
            old = client.xrange(self._key, "-", _identifier(max(0, before - 1)), count=_TRIMMED)[:-1]
            return int(client.xdel(self._key, *(identifier for identifier, _ in old))) if old else 0

        self._tier.call_log(trim)


def _replication(client: Any) -> tuple[int, list[int]] | None:
    """Return how far the master and its replicas are; None where that cannot be asked, as in a cluster."""
    if not hasattr(client, "connection_pool"):
        return None
    try:
        role = client.execute_command("ROLE")
    except Exception as error:
        if not is_rejection(error):
            raise
        return None  # not every hosted Redis has the command
    if not isinstance(role, list) or role[0] != b"master":
        return None
    return int(role[1]), [int(replica[2]) for replica in role[2]]


def _deletion(identifier: bytes, fields: dict[bytes, bytes]) -> Deletion:
    tags = tuple(fields.get(b"tags", b"").decode("utf-8", "replace").split())
    return Deletion(_position(identifier), tags, b"first" in fields)


def _position(identifier: bytes) -> int:
    milliseconds, _, sequence = identifier.partition(b"-")
    return position_of(int(milliseconds), int(sequence))


def _identifier(position: int) -> str:
    milliseconds, sequence = position_parts(position)
    return f"{milliseconds}-{sequence}"
