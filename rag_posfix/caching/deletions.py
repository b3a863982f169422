"""Deletions that outlive eviction: a log of deleted tags, which every read of a cache compares with its entries.

Deleting an entry from a store is not enough: the store may be away, may have evicted the list of the entries of a tag,
and other processes have copies. So a deletion is a tombstone: a tag and its position in a log that all processes of a
store share. An entry carries the position up to which its writer had read the log before the entry was computed. An
entry is served only if no tombstone of one of its tags is younger. Positions are given by the store, in one order, so
that the clocks of the processes do not matter.

A lease makes a confirmed deletion final: a process serves nothing once its last reading of the log is older than the
lease, and a deletion is pending until it has been in the log for that long. A process whose log was replaced (a
failover lost the end, or a restart lost everything) writes the tombstones that it knows again and serves nothing that
is older.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_SEQUENCE_BITS = 20
_PENDING = 1 << 100  # younger than every entry
MAX_TAGS = 500_000
"""Tombstones of a process; beyond this number the newer half stays."""
EVERYTHING = "*"
"""A tag that every entry has."""
_BATCH_TAGS = 1000
_BACKOFF_SECONDS = (0.1, 2.0)
_POLLS_PER_LEASE = 4
_DEFAULT_POLL_SECONDS = 0.5
_DELETE_SECONDS = 1.0
_logger = logging.getLogger(__name__)


def position_of(milliseconds: int, sequence: int) -> int:
    """Return the position of an entry of the log as one number."""
    return (milliseconds << _SEQUENCE_BITS) | min(sequence, (1 << _SEQUENCE_BITS) - 1)


def position_parts(position: int) -> tuple[int, int]:
    """Return milliseconds and sequence number of a position."""
    return position >> _SEQUENCE_BITS, position & ((1 << _SEQUENCE_BITS) - 1)


@dataclass(frozen=True, slots=True)
class Deletion:
    """An entry of the log. ``starts_log`` is false if deletions before it may have been trimmed or lost."""

    position: int
    tags: tuple[str, ...]
    starts_log: bool = False


class DeletionStore(ABC):
    """A log that several processes share. Each method returns None if the store fails."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether every further call fails."""

    @property
    @abstractmethod
    def wait_seconds(self) -> float:
        """How long waiting for the store is worth it."""

    @abstractmethod
    def read(self, start: int) -> Sequence[Deletion] | None:
        """Return the entries from position ``start`` on, ``start`` included."""

    @abstractmethod
    def append(self, tags: Sequence[str], above: int, *, starts_log: bool = False) -> int | None:
        """Add an entry at a position above ``above``; return the position."""

    @abstractmethod
    def holds(self, position: int) -> bool | None:
        """Return whether the entry is in the log, and in a replica if there are any."""

    @abstractmethod
    def trim(self, before: int) -> None:
        """Remove entries before a position, except the last of them."""


class Deletable(Protocol):
    """What is compared of an entry."""

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def position(self) -> int: ...


_E = TypeVar("_E", bound=Deletable)


class DeletionLog:
    """The tombstones of one cache in this process. A thread follows the log of the store; reads never wait for it.

    Args:
        cache: Name of the cache, for the log.
        store: The shared log; None if no other process shares a tier.
        lease_seconds: How long entries are served after the log was read; 0 for no limit: other processes then serve
            a deleted document until they read the log again.
        lifetime_seconds: Tombstones older than this are removed; None keeps all, up to 500,000 tags. Older entries are
            then misses, whatever their tags are.
        drop: Called with the tags that were deleted elsewhere, and those whose deletion was late; the second argument
            says whether the store must delete them too.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        cache: str,
        store: DeletionStore | None = None,
        *,
        lease_seconds: float = 2.0,
        lifetime_seconds: float | None = None,
        drop: Callable[[Sequence[str], bool], None] = lambda tags, late: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._store = store
        self._lease = lease_seconds
        self._poll = lease_seconds / _POLLS_PER_LEASE or _DEFAULT_POLL_SECONDS
        self._lifetime = lifetime_seconds
        self._drop = drop
        self._clock = clock
        self._tombstones: dict[str, int] = {}
        self._pending: dict[str, int] = {}  # tag: number of the deletion that the store lacks
        self._unconfirmed: list[tuple[int, tuple[str, ...], float]] = []  # position, tags, when to check
        self._n_deletions = 0
        self._floor = 0  # entries before it are not served: deletions may have been lost
        self._lease_end = 0.0
        self._failing = False
        self._closed = False
        self._published = 0
        self.position = 0
        """How far the log was read. An entry gets the position from before it was computed."""
        self._reset()

    @property
    def pending(self) -> int:
        """Deleted tags that other processes may still serve: the store lacks them, or has them for a moment only."""
        with self._changed:
            return len(self._pending) + sum(len(tags) for _, tags, _ in self._unconfirmed)

    def is_current(self, *, wait: bool = False) -> bool:
        """Return whether entries may be served: the log was read within the lease. ``wait`` for a reading if not.

        The first reading begins when it is waited for, or with ``start``: a store that fails then delays no request.
        """
        if self._clock() < self._lease_end:
            return True
        if wait or not self._lease:
            self.start()
        if self._store is None or not self._lease:
            return True
        with self._changed:
            if wait and not self._failing:
                self._wake()
                self._changed.wait_for(lambda: self._is_leased() or self._failing, self._store.wait_seconds)
            return self._is_leased()

    def surviving(self, entries: dict[str, _E]) -> dict[str, _E]:
        """Return ``entries`` without those that were deleted since they were computed."""
        tombstones, floor = self._tombstones, self._floor
        deleted = []
        for key, entry in entries.items():  # a plain loop: this is part of every hit
            position = entry.position
            if position < floor:
                deleted.append(key)
                continue
            for tag in entry.tags:
                if tag in tombstones and tombstones[tag] > position:
                    deleted.append(key)
                    break
        return {key: entry for key, entry in entries.items() if key not in deleted} if deleted else entries

    def delete(self, tags: Iterable[str]) -> None:
        """Delete ``tags``: at once in this process, and in the store as soon as it works; wait for it a second."""
        tags = tuple(dict.fromkeys(tags))
        if not tags:
            return
        self.start()
        with self._changed:
            if self._store is None:
                self.position = max(self.position + 1, position_of(time.time_ns() // 1_000_000, 0))
                self._tombstones |= dict.fromkeys(tags, self.position)
                self._floor = self.position if EVERYTHING in tags else self._floor
                self._prune()
                return
            self._n_deletions += 1
            number = self._n_deletions
            self._pending |= dict.fromkeys(tags, number)
            self._tombstones |= dict.fromkeys(tags, _PENDING)
            self._wake()

            def is_done() -> bool:
                is_known = self._published <= self.position and all(self._pending.get(tag) != number for tag in tags)
                return is_known or self._failing or self._closed

            self._changed.wait_for(is_done, _DELETE_SECONDS)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until no deletion is pending; return False after the timeout."""
        with self._changed:
            self._wake()
            return self._changed.wait_for(lambda: not self._pending and not self._unconfirmed, timeout_seconds)

    def close(self) -> None:
        """End the thread. Deletions that are still pending are logged and lost to other processes."""
        with self._changed:
            self._closed = True
            lost = len(self._pending)
            self._wake()
        if lost:
            _logger.warning("%s: closed before the store had %d deletions; delete them again", self._cache, lost)
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(_DELETE_SECONDS)

    def _is_leased(self) -> bool:
        return self._clock() < self._lease_end

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._woken = False

    def start(self) -> None:
        """Follow the log of the store from now on."""
        if self._store is None or self._closed or (self._thread is not None and self._pid == os.getpid()):
            return
        if self._pid != os.getpid():  # threads do not survive a fork
            self._reset()
        with self._changed:
            if self._thread is None:
                name = "rag-posfix-deletions"
                self._thread = threading.Thread(target=self._follow, args=(self._store,), name=name, daemon=True)
                self._thread.start()

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _follow(self, store: DeletionStore) -> None:
        """Read the log, and write what it lacks, until the log is closed."""
        delay = shortest = _BACKOFF_SECONDS[0]
        while not (self._closed or store.is_closed):
            works = self._synchronise(store)
            delay = shortest if works else min(2 * delay, _BACKOFF_SECONDS[1])
            with self._changed:
                self._failing = not works
                self._changed.notify_all()
                timeout = self._poll if works else delay
                # A failing store is not asked more often because more requests wait for it.
                self._changed.wait_for(lambda: self._closed or (self._woken and not self._failing), timeout)
                self._woken = False

    def _synchronise(self, store: DeletionStore) -> bool:
        """Write pending deletions, read the log and check what was written; return whether the store worked."""
        try:
            if not self._read(store):
                return False
            with self._changed:
                has_pending = bool(self._pending)
            return (not has_pending or (self._publish(store) and self._read(store))) and self._confirm(store)
        except Exception as error:  # a store that raises what it does not foresee
            _logger.warning("%s: the log of deletions failed (%s)", self._cache, type(error).__name__)
            return False

    def _publish(self, store: DeletionStore) -> bool:
        with self._changed:
            pending, was_failing = dict(self._pending), self._failing
        tags = list(pending)
        for start in range(0, len(tags), _BATCH_TAGS):
            batch = tuple(tags[start : start + _BATCH_TAGS])
            is_first = not (start or self.position or self._published)  # the log was read, and is empty
            position = store.append(batch, self.position, starts_log=is_first)
            if position is None:
                return False
            if was_failing:  # the store could not delete its entries either
                self._drop(batch, True)
            with self._changed:
                for tag in batch:
                    if self._pending.get(tag) == pending[tag]:
                        del self._pending[tag]
                        self._tombstones[tag] = position
                self._unconfirmed.append((position, batch, self._clock() + self._lease))
                self._published = position
        with self._changed:
            horizon = self._prune() if tags else 0
        if horizon:
            store.trim(horizon)
        return True

    def _read(self, store: DeletionStore) -> bool:
        started, position = self._clock(), self.position
        deletions = store.read(position)
        if deletions is None:
            return False
        if position and (not deletions or deletions[0].position != position):
            return self._replace(store, started)
        if not position and deletions and not deletions[0].starts_log:
            self._floor = max(self._floor, deletions[0].position)
        self._learn([deletion for deletion in deletions if deletion.position != position], started)
        return True

    def _replace(self, store: DeletionStore, started: float) -> bool:
        """Write the known tombstones into a log that lacks them; nothing that is older is served any more."""
        _logger.warning("%s: the log of deletions was replaced; older entries are not used any more", self._cache)
        with self._changed:
            tags = [tag for tag in self._tombstones if tag not in self._pending]
        floor = store.append((), self.position)
        if floor is None:
            return False
        for start in range(0, len(tags), _BATCH_TAGS):
            if store.append(tags[start : start + _BATCH_TAGS], floor) is None:
                return False
        deletions = store.read(0)
        if not deletions:
            return False
        self._floor = floor
        self._learn(deletions, started)
        return True

    def _learn(self, deletions: Sequence[Deletion], started: float) -> None:
        """Take over what was read of the log, which was begun to be read at ``started``."""
        new: list[str] = []
        with self._changed:
            own = {position for position, _, _ in self._unconfirmed}
            for deletion in deletions:
                for tag in deletion.tags:
                    if self._tombstones.get(tag, 0) < deletion.position:
                        self._tombstones[tag] = deletion.position
                if EVERYTHING in deletion.tags:
                    self._floor = max(self._floor, deletion.position)
                if deletion.position not in own:
                    new += deletion.tags
            if deletions:
                self.position = deletions[-1].position
                self._prune()
            self._lease_end = started + self._lease
            self._changed.notify_all()
        if new:
            self._drop(new, False)

    def _confirm(self, store: DeletionStore) -> bool:
        with self._changed:
            due = [item for item in self._unconfirmed if item[2] <= self._clock()]
        for item in due:
            position, tags, _ = item
            holds = store.holds(position)
            if holds is None:
                return False
            with self._changed:
                self._unconfirmed.remove(item)
                if not holds:  # a failover lost it, or no replica has it yet
                    self._n_deletions += 1
                    self._pending |= dict.fromkeys(tags, self._n_deletions)
                    self._tombstones |= dict.fromkeys(tags, _PENDING)
                self._changed.notify_all()
        return True

    def _prune(self) -> int:
        """Remove tombstones that are too old or too many; return the position of the first one that stays, or 0."""
        positions = [position for position in self._tombstones.values() if position != _PENDING]
        horizon = 0
        if self._lifetime is not None and positions:
            newest, _ = position_parts(max(positions))
            horizon = position_of(max(0, newest - int(self._lifetime * 1000)), 0)
        if len(positions) > MAX_TAGS:
            horizon = max(horizon, sorted(positions)[-MAX_TAGS // 2])
        if any(position < horizon for position in positions):
            self._floor = max(self._floor, *(position for position in positions if position < horizon))
            self._tombstones = {tag: position for tag, position in self._tombstones.items() if position >= horizon}
        return horizon
