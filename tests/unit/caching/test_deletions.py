"""Deleted tags of two processes: a shared set in memory, and caches with tiers of their own."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from rag_posfix.caching import deletions
from rag_posfix.caching.answers.tiered import Blob, TieredAnswerCache
from rag_posfix.caching.deletions import PAGE_TAGS, DeletedTags, SharedTags
from rag_posfix.caching.tier import MemoryTier
from tests.support.clock import Clock
from tests.support.waiting import wait_until

ANSWER = {"text": "Paris"}
NOW = 1_000_000.0


class SharedSet(SharedTags):
    """The deleted tags in memory, with the times of ``clock``.

    ``works`` is false while it is away; ``knows_tags`` once it has evicted which entries a tag has.
    """

    is_closed = False
    wait_seconds = 60.0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: dict[str, int] = {}
        self.works = self.knows_tags = True

    def add(self, tags: Sequence[str]) -> int | None:
        if not self.works:
            return None
        first = max(int(self.clock.now * 1e6), max(self.times.values(), default=0) + 1)
        self.times |= {tag: first + index for index, tag in enumerate(tags)}
        return first

    def read(self, last: tuple[str, int]) -> tuple[dict[str, int], bool] | None:
        if not self.works:
            return None
        is_lost = bool(last[0]) and self.times.get(last[0], 0) < last[1]
        after = 0 if is_lost else last[1]
        later = sorted((time, tag) for tag, time in self.times.items() if time > after)
        return {tag: time for time, tag in later[:PAGE_TAGS]}, is_lost


class Gate(SharedTags):
    """A process's way to the set, on which readings wait while it is shut."""

    is_closed = False
    wait_seconds = 60.0

    def __init__(self, tags: SharedSet) -> None:
        self.add, self.tags, self.open = tags.add, tags, threading.Event()
        self.open.set()

    def add(self, tags: Sequence[str]) -> int | None: ...

    def read(self, last: tuple[str, int]) -> tuple[dict[str, int], bool] | None:
        self.open.wait()
        return self.tags.read(last)


class SharedTier(MemoryTier[Blob]):
    """A tier that processes share, as Redis is."""

    name = "shared"
    is_synchronous = False

    def __init__(self, server: SharedSet) -> None:
        super().__init__(clock=server.clock)
        self.server = self.deleted_tags = server

    def delete_tags(self, tags: Sequence[str]) -> int:
        return super().delete_tags(tags) if self.server.works and self.server.knows_tags else 0


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch):
    monkeypatch.setattr(deletions, "POLL_SECONDS", 0.01)


@pytest.fixture
def clock():
    return Clock(NOW)


@pytest.fixture
def shared(clock):
    return SharedTier(SharedSet(clock))


@pytest.fixture
def process(shared, clock):
    """Starts a process: a cache with a memory of its own, before the shared tier."""
    with ExitStack() as stack:

        def start(tags=None):
            memory, tier = MemoryTier(clock=clock), copy.copy(shared)
            tier.deleted_tags = tags or shared.server
            cache = TieredAnswerCache([memory, tier], clock=clock)
            stack.callback(cache.close)
            return cache, memory

        yield start


def test_a_copy_in_the_memory_of_another_process_is_erased(process):
    (first, _), (second, memory) = process(), process()
    first.put("key", ANSWER, ["doc"])
    first.put("kept", ANSWER, ["other"])
    assert (second.get("key"), second.get("kept")) == (ANSWER, ANSWER)
    first.drop_documents(["doc"])
    wait_until(lambda: memory.keys() == ["kept"])


def test_an_answer_whose_question_began_before_a_deletion_elsewhere_is_stored_nowhere(process, shared):
    (first, _), (second, memory) = process(), process()
    question = second.begin()
    first.drop_documents(["doc"])
    wait_until(lambda: first.pending_deletions == 0)
    wait_until(lambda: second.put("key", ANSWER, ["doc"]) or not memory.keys())
    second.put("key", ANSWER, ["doc"])
    assert memory.keys() == shared.keys() == []
    del question
    second.put("key", ANSWER, ["doc"])
    assert memory.keys() == shared.keys() == ["key"], "the document may have been added again"


def test_an_answer_that_was_written_late_is_erased_from_the_shared_tier_as_well(process, shared):
    gate = Gate(shared.server)
    (first, _), (second, memory) = process(), process(gate)
    assert second.get("key") is None, "it has read the set, which is empty"
    gate.open.clear()
    first.drop_documents(["doc"])
    second.put("key", ANSWER, ["doc"])
    assert memory.keys() == shared.keys() == ["key"]
    gate.open.set()
    wait_until(lambda: memory.keys() == shared.keys() == [])


def test_a_deletion_during_a_write_erases_what_was_written(clock):
    class Deleting(MemoryTier):
        def put_many(self, entries):
            super().put_many(entries)
            cache.drop_documents(["doc"])

    memory, deleting = MemoryTier(), Deleting()
    cache = TieredAnswerCache([deleting, memory])
    cache.put("key", ANSWER, ["doc"])
    assert deleting.keys() == memory.keys() == []


def test_a_deletion_while_redis_is_away_is_pending_and_reaches_all_tiers_when_it_is_back(process, shared):
    (first, _), (second, memory) = process(), process()
    first.put("key", ANSWER, ["doc"])
    assert second.get("key") == ANSWER
    shared.server.works = False
    assert first.drop_documents(["doc"]) == 1, "of its own memory"
    assert first.pending_deletions == 1
    assert not first.flush_deletions(0.1)
    assert (memory.keys(), shared.keys()) == (["key"], ["key"])
    shared.server.works = True
    assert first.flush_deletions(30)
    wait_until(lambda: memory.keys() == shared.keys() == [])


def test_a_deletion_that_redis_lost_is_added_again_by_a_process_that_knows_it(process, shared):
    (first, _), (second, _) = process(), process()
    second.put("key", ANSWER, ["other"])
    first.drop_documents(["doc"])
    assert first.flush_deletions(30)
    known = set(shared.server.times)
    shared.server.times = {}
    wait_until(lambda: known and set(shared.server.times) == known)
    assert first.flush_deletions(30)


def test_an_entry_whose_tag_was_evicted_is_older_than_the_deletion_and_not_served(process, shared, clock):
    first, _ = process()
    first.put("key", ANSWER, ["doc"])
    shared.server.knows_tags = False
    clock.advance(1)
    first.drop_documents(["doc"])
    third, memory = process()  # one that starts after the deletion
    assert shared.keys() == ["key"]
    assert (first.get("key"), third.get("key"), memory.keys()) == (None, None, [])
    clock.advance(1)
    first.put("key", ANSWER, ["doc"])
    assert third.get("key") == ANSWER, "the document was added again"


def test_a_deletion_is_forgotten_after_the_lifetime_of_entries(process, shared, clock):
    first, _ = process()
    first.drop_documents(["doc"])
    clock.advance(24 * 3600 + 1)
    first.drop_documents(["second"])
    assert first.flush_deletions(30)
    shared.server.times = {}
    wait_until(lambda: shared.server.times)
    assert len(shared.server.times) == 1, "the first is not added again"


def test_clear_erases_the_memory_of_other_processes_and_what_is_stored_later_stays(process):
    (first, _), (second, memory) = process(), process()
    second.put("key", ANSWER, ["doc"])
    first.clear()
    wait_until(lambda: memory.keys() == [])
    wait_until(lambda: first.pending_deletions == 0)
    second.put("key", ANSWER)
    assert second.get("key") == ANSWER


def test_a_cache_that_is_closed_while_redis_is_away_logs_the_deletions_that_are_lost(process, shared, caplog):
    first, _ = process()
    shared.server.works = False
    first.drop_documents(["a", "b"])
    with caplog.at_level(logging.WARNING):
        first.close()
    assert "closed before Redis had 2 deletions; delete them again" in caplog.text


def test_of_too_many_deletions_the_latest_are_remembered(monkeypatch, clock):
    monkeypatch.setattr(deletions, "MAX_TAGS", 3)
    tags = DeletedTags("test", lambda tags, from_shared: 0, clock=clock)
    question = tags.begin()
    for tag in "abcd":
        tags.delete([tag])
    entries = {tag: Blob(b"", (tag,)) for tag in "abcd"}
    assert list(tags.surviving(entries)) == ["a"], "the oldest of four is forgotten"
    del question
    assert tags.surviving(entries) == entries


def test_more_deletions_than_a_page_are_read_at_once(process, shared, clock):
    shared.server.add([f"tag {number}" for number in range(2 * PAGE_TAGS)])
    erased: list[int] = []
    tags = DeletedTags(
        "test", lambda tags, _: erased.append(len(tags)) or 0, shared.server, lifetime_seconds=60, clock=clock
    )
    tags.wait_for_reading()
    tags.close()
    assert erased == [PAGE_TAGS, PAGE_TAGS]
