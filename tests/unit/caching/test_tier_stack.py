import logging

import pytest

from rag_posfix.caching.tier import TierStats
from rag_posfix.caching.tier_stack import TierStack
from rag_posfix.errors import CacheError


class Counting:
    """A tier that holds so many entries, and appends its name to a list when it is asked."""

    def __init__(self, name, entries, asked):
        self.name, self.entries, self.asked = name, entries, asked
        self.closed = False

    def clear(self):
        self.asked.append(self.name)
        return self.entries

    def stats(self):
        return TierStats(self.name, hits=self.entries)

    def close(self):
        self.closed = True


class Broken:
    name = "broken"
    works = False

    def clear(self):
        if self.works:
            return 1
        raise RuntimeError("secret")

    stats = close = clear


@pytest.fixture
def asked():
    return []


def clear(tier):
    return tier.clear()


def test_entries_are_deleted_from_the_slowest_tier_first_and_the_most_is_told(asked):
    stack = TierStack([Counting("memory", 1, asked), Counting("disk", 5, asked), Counting("redis", 3, asked)], "test")
    assert stack.delete(clear) == 5
    assert asked == ["redis", "disk", "memory"]


def test_a_hit_is_copied_only_if_nothing_was_deleted_since_its_search_began(asked):
    stack, copied, searches = TierStack([Counting("memory", 1, asked)], "test"), [], {}

    def search(name):
        searches[name] = stack.deletions
        copy()

    def copy():
        for name, deletions in searches.items():
            stack.copy_hit(deletions, lambda name=name: copied.append(name))

    search("before")
    assert copied == ["before"]
    stack.delete(clear, lambda: search("during"))
    copy()
    assert copied == ["before"]
    search("after")
    assert copied == ["before", "after"]


def test_a_tier_that_raises_is_skipped_and_logged_once_without_what_the_error_says(asked, caplog):
    broken, sound = Broken(), Counting("memory", 1, asked)
    stack = TierStack([broken, sound], "test cache")
    for _ in range(3):
        assert stack.delete(clear) == 1
    assert stack[0].call(clear, "default") == "default"
    assert stack.stats()[0] == {"name": "broken"}
    stack.close()
    assert sound.closed
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.WARNING, "test cache: the broken tier is failing (RuntimeError); answering without it")
    ]
    broken.works = True
    stack.delete(clear)
    assert caplog.records[-1].message == "test cache: the broken tier works again"


def test_statistics_are_plain_data_in_the_order_of_the_tiers(asked):
    stack = TierStack([Counting("memory", 1, asked), Counting("disk", 5, asked)], "test")
    assert [(tier["name"], tier["hits"], tier["bytes"]) for tier in stack.stats()] == [
        ("memory", 1, None),
        ("disk", 5, None),
    ]
    assert len(stack) == 2


def test_a_stack_without_tiers_is_refused():
    with pytest.raises(CacheError, match="test cache: needs at least one tier"):
        TierStack([], "test cache")
