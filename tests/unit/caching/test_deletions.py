"""The log of deletions of one process: its limits, and the lease of a reading. A store in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import pytest

from rag_posfix.caching import deletions
from rag_posfix.caching.deletions import Deletion, DeletionLog, DeletionStore, position_of
from tests.support.clock import Clock
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class Entry:
    position: int
    tags: tuple[str, ...]


class Store(DeletionStore):
    """A log in memory, of which each reading takes ``read_seconds``; it fails after ``readings`` of them."""

    is_closed = False
    wait_seconds = 5.0

    def __init__(self, clock: Clock, entries: Sequence[Deletion] = (), read_seconds: float = 0.0, readings: int = 99):
        self.clock, self.entries, self.read_seconds, self.readings = clock, list(entries), read_seconds, readings

    def read(self, start: int) -> Sequence[Deletion] | None:
        self.readings -= 1
        if self.readings < 0:
            return None
        self.clock.advance(self.read_seconds)
        return [entry for entry in self.entries if entry.position >= start]

    def append(self, tags: Sequence[str], above: int, *, starts_log: bool = False) -> int | None:
        self.entries.append(Deletion(above + 1, tuple(tags), starts_log))
        return above + 1

    def holds(self, position: int) -> bool | None:
        return any(entry.position == position for entry in self.entries)

    def trim(self, before: int) -> None:
        self.entries = [entry for entry in self.entries if entry.position >= before]


def served(log: DeletionLog, position: int, tag: str = "other") -> bool:
    """Whether an entry with a tag is served that was computed at a position of the log."""
    return bool(log.surviving({"key": Entry(position, (tag,))}))


def test_of_too_many_deletions_the_newer_half_is_remembered_and_older_entries_are_not_served(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(deletions, "MAX_TAGS", 4)
    log, positions = DeletionLog("test"), [0]
    for tag in "abcd":
        log.delete([tag])
        positions.append(log.position)
    assert [served(log, positions[0], tag) for tag in "abcdx"] == [False] * 4 + [True], "four are not too many"
    log.delete(["e"])
    *_, at_c, at_d = positions
    assert [served(log, at_c - 1, tag) for tag in "abcdex"] == [False] * 6, "what else was deleted then is forgotten"
    assert [served(log, at_c, tag) for tag in "abcdex"] == [True] * 3 + [False] * 2 + [True]
    assert [served(log, at_d, tag) for tag in "abcdex"] == [True] * 4 + [False, True]


def test_deletions_older_than_the_lifetime_of_entries_are_forgotten():
    clock = Clock()
    # 1 s lifetime: of the last one, at 5 s, and those from 4 s on.
    entries = [Deletion(position_of(ms, 0), (f"at {ms}",), ms == 3000) for ms in (3000, 3999, 4000, 5000)]
    store = Store(clock, entries)
    with closing(DeletionLog("test", store, lifetime_seconds=1.0, clock=clock)) as log:
        log.start()
        wait_until(log.is_current)
        assert log.position == position_of(5000, 0)
        assert [served(log, position_of(3999, 0), tag) for tag in ("at 3000", "at 3999", "at 4000", "x")] == [
            True, True, False, True,
        ]  # fmt: skip
        assert not served(log, position_of(3999, 0) - 1), "the floor"


def test_a_lease_begins_when_the_log_begins_to_be_read():
    clock = Clock(now=0.0)
    store = Store(clock, read_seconds=1.5, readings=1)
    with closing(DeletionLog("test", store, lease_seconds=2.0, clock=clock)) as log:
        assert not log.is_current()
        log.start()
        wait_until(log.is_current)  # at 1.5 s
        clock.now = 1.99
        assert log.is_current()
        clock.now = 2.0
        assert not log.is_current(), "a deletion of 0.1 s may be missing in what was read"
