"""The short form of ``python -m benchmarks.faults``: every fault on a running service under load, a second of each.

What is asserted holds however busy the machine is: answers, statuses, what was stored. Times are for the benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.fuzz import fuzz, growth
from benchmarks.faults.scenarios import (
    FAILOVERS,
    FAULTS,
    disk_full,
    failover,
    leaving_clients,
    redis_fault,
    slow_clients,
    unread_searches,
)
from benchmarks.faults.service import Host

pytestmark = pytest.mark.slow

SECONDS = 0.2


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """One process for the services of all tests: its start takes longer than a fault."""
    with Host() as started:
        yield started


def assert_unharmed(row: dict[str, Any]) -> None:
    """Every request got its right answer, before, during and after the fault."""
    counts = {name: row[name] for name in ("failed", "wrong", "undocumented")}
    assert counts == {"failed": 0, "wrong": 0, "undocumented": 0}
    assert min(row[phase]["requests"] for phase in ("before", "during", "after")) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_redis_harms_no_answer_and_redis_is_used_again(host: Host, name: str):
    row = redis_fault(host, name, SECONDS)
    assert_unharmed(row)
    assert row["hits_before"] > 0, "the fault must hit a Redis that is in use"
    assert row["recovered_s"] < 60


@pytest.mark.parametrize("name", FAILOVERS)
def test_a_failover_harms_no_answer_and_the_new_leader_is_used(host: Host, name: str):
    row = failover(host, name, SECONDS)
    assert_unharmed(row)
    assert row["hits_before"] > 0


def test_a_full_disk_harms_no_answer_and_loses_none_that_was_stored(host: Host, tmp_path: Path):
    row = disk_full(host, tmp_path, SECONDS)
    assert_unharmed(row)
    assert row["lost"] == 0


def test_slow_clients_are_told_and_others_are_answered(host: Host):
    row = slow_clients(host, 2 * SECONDS)
    assert_unharmed(row)
    assert row["slow_told_408"] == 20


def test_clients_that_leave_leave_nothing_open(host: Host):
    row = leaving_clients(host, SECONDS)
    assert_unharmed(row)
    assert row["left_open"] == 0


def test_search_responses_that_nobody_reads_are_counted_and_bounded(host: Host, tmp_path: Path):
    row = unread_searches(host, tmp_path, 2 * SECONDS)
    assert_unharmed(row)
    assert row["too_large"] == 413
    assert row["statuses"]["429"] > 0
    assert row["counted"] >= row["statuses"]["200"] > 0


def test_fuzzed_requests_get_documented_statuses(host: Host):
    found = fuzz(host.serve(), 300, seed=1)
    assert found["undocumented"] == []
    assert found["wrong"] == 0
    assert {"200", "400", "422"} <= set(found["statuses"])
    assert sum(found["statuses"].values()) == 300


def test_memory_does_not_grow_with_requests(host: Host):
    found = growth(host, 400)
    assert found["wrong"] == 0
    assert found["grown_mib"] < 4, found["mib"]  # a kept body alone would be 200 requests of 10 KB
