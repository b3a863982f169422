"""Wrong secrets cost others little."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

from benchmarks.faults.service import Host
from benchmarks.service_load import wrong_keys
from rag_posfix_api.http.auth import Rejections, source_of
from rag_posfix_api.keys.store import KeyStore
from tests.support.clock import Clock


def test_refusals_are_a_fiftieth_of_a_second_apart_and_wait_five_seconds_at_most():
    clock = Clock()
    rejections = Rejections(clock)
    assert rejections.pause("a") == 0
    assert rejections.pause("a") == pytest.approx(0.02)
    assert rejections.pause("a") == pytest.approx(0.04)
    clock.now += 0.05
    assert rejections.pause("a") == pytest.approx(0.01)
    assert max(rejections.pause("a") for _ in range(400)) == 5
    assert rejections.pause("b") == 0, "another source does not wait"
    for number in range(5000):
        rejections.pause(f"source {number}")
    assert rejections.pause("a") == 0, "the oldest of many sources is forgotten"
    clock.now += 60
    assert rejections.pause("b") == 0


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("testclient", "testclient"),
    ],
)
def test_a_source_is_an_address_or_a_network_that_one_customer_has(host: str, source: str):
    assert source_of({"type": "http", "client": (host, 1234)}) == source
    assert source_of({"type": "http"}) == source_of({"type": "http", "client": None}) == ""


@pytest.fixture(scope="module")
def attack() -> Iterator[tuple[Host, Executor]]:
    """A process for services and one that floods them."""
    with Host() as host, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as flooding:
        yield host, flooding


@pytest.mark.slow
def test_no_valid_key_is_refused_under_wrong_secrets_on_200_connections(tmp_path: Path, attack: tuple[Host, Executor]):
    """What it costs others, the benchmark measures: ``python -m benchmarks.service_load keys``."""
    store, (host, flooding) = KeyStore(tmp_path), attack
    attacked, *valid = [store.create(f"tenant{number}")[1] for number in range(16)]
    url = host.serve(limits={"data_dir": str(tmp_path)})
    measured = wrong_keys(url, [attacked, *valid], valid, 0.2, flooding)
    assert (measured["connections"], measured["valid"], measured["refused"]) == (200, 15, 0)
    assert measured["wrong_per_s"] <= 60  # each is told a fiftieth of a second after the one before
