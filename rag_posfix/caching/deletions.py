"""Deleted tags: every copy of a deleted entry is erased, in this process and in those that share a Redis.

Keys of entries are hashes of the documents' content, so that nobody asks for an entry of a deleted document but by
sending its text. What remains is to erase it. The process that deletes a tag erases its entries from every tier, and
adds the tag to a sorted set in Redis, which each process reads once a second to do the same. An entry is not stored
while a computation is open that began before one of its tags was deleted: it could be the result. An entry that
outlives its deletion in a tier, because Redis evicted the list of its tag or a disk was read-only, is older than the
deletion, and not served.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

MAX_TAGS = 500_000
"""Deleted tags that a process, or the set in Redis, remembers: the latest."""
EVERYTHING = "*"
"""A tag that every entry has."""
POLL_SECONDS = 1.0
PAGE_TAGS = 10_000
"""The most tags of one reading."""
_BATCH_TAGS = 1000
_ADDING = -1
_BEING_ERASED = 1 << 60
_CLOSE_SECONDS = 1.0
_logger = logging.getLogger(__name__)


class SharedTags(ABC):
    """The deleted tags that several processes share, with times in microseconds, which grow with each tag."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether every further call fails."""

    @property
    @abstractmethod
    def wait_seconds(self) -> float:
        """How long waiting for a reading is worth it."""

    @abstractmethod
    def add(self, tags: Sequence[str]) -> int | None:
        """Add tags as deleted now; return the time of the first, None if that fails."""

    @abstractmethod
    def read(self, last: tuple[str, int]) -> tuple[dict[str, int], bool] | None:
        """Return at most ``PAGE_TAGS`` times by tag after the ``last`` that was read; None if that fails.

        True if ``last`` is gone, as after a failover; all tags are then read again.
        """


class Deletable(Protocol):
    """What is compared of an entry."""

    @property
    def tags(self) -> tuple[str, ...]: ...

    @property
    def expires_at(self) -> float: ...


class Computation:
    """A computation whose result may be stored. It is open as long as something refers to it."""

    __slots__ = ("__weakref__", "began", "n_deletions")

    def __init__(self, began: float, n_deletions: int) -> None:
        self.began = began
        self.n_deletions = n_deletions

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Deletion(NamedTuple):
    time: float
    """Seconds since 1970."""
    number: int
    """How many this process had executed then; 0 for what others deleted before it first read the set."""


_E = TypeVar("_E", bound=Deletable)


class DeletedTags:
    """The tags that were deleted within the lifetime of entries. A thread reads those of other processes.

    Args:
        cache: Name of the cache, for the log.
        erase: Erases the entries of tags and returns their number; the second argument says whether also from the
            tiers that processes share.
        shared: None if no other process shares a tier.
        lifetime_seconds: How long after its computation an entry expires; None if that is not known.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        cache: str,
        erase: Callable[[Sequence[str], bool], int],
        shared: SharedTags | None = None,
        *,
        lifetime_seconds: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._erase = erase
        self._shared = shared
        self._lifetime = lifetime_seconds
        self._clock = clock
        self._deleted: dict[str, _Deletion] = {}  # the latest last
        self._n_deletions = 0
        self._pending: dict[str, int | None] = {}  # time in the set; None if adding the tag failed
        self._read_back: dict[str, int] = {}  # pending tags that a reading found
        self._last = ("", 0)
        self._has_read = self._has_tried = self._is_failing = self._closed = False
        self._computations: weakref.WeakSet[Computation] = weakref.WeakSet()
        self._reset()

    @property
    def pending(self) -> int:
        """Deleted tags that the set lacks, or has for less than a second: other processes may have copies."""
        with self._changed:
            return len(self._pending)

    def begin(self) -> Computation:
        """Open a computation: what is deleted from now on is not stored until nothing refers to it any more."""
        self._start()
        with self._changed:
            computation = Computation(self._clock(), self._n_deletions)
            self._computations.add(computation)
        return computation

    def wait_for_reading(self) -> None:
        """Wait until the set was read once, or that failed, if entries are compared with deletions of the past."""
        self._start()
        if self._shared is not None and self._lifetime is not None and not (self._has_tried or self._closed):
            with self._changed:
                self._changed.wait_for(lambda: self._has_tried, self._shared.wait_seconds)

    def of(self, entries: Mapping[str, Deletable]) -> dict[str, list[str]]:
        """Return the keys of entries that were deleted since they, or an open computation, began; and their tags."""
        if not self._deleted:
            return {}
        with self._changed:
            computations = list(self._computations)
        number = min((computation.n_deletions for computation in computations), default=self._n_deletions)
        began = min((computation.began for computation in computations), default=self._clock())
        found: dict[str, list[str]] = {}
        for key, entry in entries.items():
            since = began if self._lifetime is None else min(began, entry.expires_at - self._lifetime)
            for tag in (*entry.tags, EVERYTHING):
                deletion = self._deleted.get(tag)
                if deletion is not None and (deletion.number > number or deletion.time > since):
                    found.setdefault(key, []).append(tag)
        return found

    def surviving(self, entries: dict[str, _E]) -> dict[str, _E]:
        """Return ``entries`` without those that were deleted."""
        deleted = self.of(entries)
        return {key: entry for key, entry in entries.items() if key not in deleted} if deleted else entries

    def delete(self, tags: Iterable[str]) -> int:
        """Tell other processes, now or when that works, and erase the entries of ``tags``; return their number."""
        tags = list(dict.fromkeys(tags))
        self._start()
        with self._changed:
            noted = self._note(dict.fromkeys(tags, self._clock()))
            self._pending |= {} if self._shared is None else dict.fromkeys(tags, _ADDING)
        if self._shared is not None:
            missing = tags if self._is_failing else tags[self._publish(self._shared, tags) :]
            with self._changed:
                self._is_failing = self._is_failing or bool(missing)  # further deletions do not wait for it
                self._pending |= {tag: None for tag in missing if self._pending.get(tag) == _ADDING}
        return self._execute(noted)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until no deletion is pending; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def close(self) -> None:
        """End the thread. Deletions that the set lacks are logged, and lost to other processes."""
        with self._changed:
            self._closed = True
            lost = list(self._pending.values()).count(None)
            self._changed.notify_all()
        if lost:
            _logger.warning("%s: closed before Redis had %d deletions; delete them again", self._cache, lost)
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(_CLOSE_SECONDS)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def _start(self) -> None:
        """Read the set each second from now on."""
        if self._shared is None or self._closed or (self._thread is not None and self._pid == os.getpid()):
            return
        if self._pid != os.getpid():  # threads do not survive a fork
            self._reset()
        with self._changed:
            if self._thread is None:
                name = "rag-posfix-deletions"
                self._thread = threading.Thread(target=self._follow, args=(self._shared,), name=name, daemon=True)
                self._thread.start()

    def _follow(self, shared: SharedTags) -> None:
        while not (self._closed or shared.is_closed):
            works = False
            try:
                works = self._synchronise(shared)
            except Exception as error:  # a store that raises what it does not foresee
                _logger.warning("%s: reading deletions failed (%s)", self._cache, type(error).__name__)
            with self._changed:
                self._has_tried, self._is_failing = True, not works
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed, POLL_SECONDS)

    def _synchronise(self, shared: SharedTags) -> bool:
        """Erase what other processes deleted, and add what the set lacks; return whether the set worked."""
        read_before, n_read = dict(self._read_back), PAGE_TAGS
        while n_read == PAGE_TAGS:
            if (found := shared.read(self._last)) is None:
                return False
            n_read, is_first = len(found[0]), not self._has_read
            with self._changed:
                noted = self._take(*found)
                self._has_read = self._has_read or n_read < PAGE_TAGS
            self._execute(noted, is_first=is_first)
        with self._changed:
            for tag, found_at in read_before.items():
                if 0 < (self._pending.get(tag) or 0) <= found_at:
                    del self._pending[tag]
            self._read_back = {tag: found_at for tag, found_at in self._read_back.items() if tag in self._pending}
            missing = [tag for tag, added in self._pending.items() if added is None]
        late = missing[: self._publish(shared, missing)]  # Redis failed at the deletion, or lost it in a failover
        with self._changed:
            noted = self._note(dict.fromkeys(late, self._clock()))
        self._execute(noted)
        return len(late) == len(missing)

    def _take(self, times: Mapping[str, int], is_lost: bool) -> dict[str, _Deletion]:
        """Note the tags of a page of the set; return those that others deleted."""
        if is_lost:
            self._last = ("", 0)
            self._pending |= dict.fromkeys(self._deleted.keys() - times.keys())
        own = {tag for tag, added in times.items() if added >= (self._pending.get(tag) or added + 1)}
        self._read_back |= {tag: times[tag] for tag in own}
        self._last = max(times.items(), key=lambda item: item[1], default=self._last)
        return self._note({tag: added / 1e6 for tag, added in times.items() if tag not in own})

    def _execute(self, noted: Mapping[str, _Deletion], *, is_first: bool = False) -> int:
        """Erase the entries of tags; what began before the end of that counts as begun before the deletion.

        At the first reading nothing is erased from the shared tiers: the processes that ran then have done it.
        """
        tags = [tag for tag in noted if not (is_first and tag == EVERYTHING)]
        count = self._erase(tags, not is_first) if tags else 0
        with self._changed:
            self._n_deletions += bool(tags)
            number = 0 if is_first else self._n_deletions
            for tag, deletion in noted.items():
                if self._deleted.get(tag) is deletion:
                    self._deleted[tag] = deletion._replace(number=number)
        return count

    def _note(self, times: Mapping[str, float]) -> dict[str, _Deletion]:
        noted = {tag: _Deletion(seconds, _BEING_ERASED) for tag, seconds in times.items()}
        for tag, deletion in noted.items():
            self._deleted.pop(tag, None)
            self._deleted[tag] = deletion
        horizon = -1.0 if self._lifetime is None else self._clock() - self._lifetime
        while self._deleted:
            first = next(iter(self._deleted))
            if len(self._deleted) <= MAX_TAGS and self._deleted[first].time >= horizon:
                break
            del self._deleted[first]
        return noted

    def _publish(self, shared: SharedTags, tags: Sequence[str]) -> int:
        """Add tags to the set; return how many of the first ones it has."""
        for start in range(0, len(tags), _BATCH_TAGS):
            batch = tags[start : start + _BATCH_TAGS]
            if (added := shared.add(batch)) is None:
                return start
            with self._changed:
                self._pending |= {tag: added for tag in batch if tag in self._pending}
        return len(tags)
