"""Options of a test run: the limit of processor time of a test, which ``make test`` sets, and a random order."""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Generator
from itertools import groupby

import pytest

LOOP_SECONDS = 0.1
"""What ``loop`` takes on an idle core of the machines that the limit was chosen on."""
MAX_NEW_MODULES = 30
"""A test that imports more pays for all later ones of its process, as the first of hypothesis for its tables."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-limit", type=float, help="seconds of a processor for a test that is not slow")
    parser.addoption("--order-seed", type=int, help="run files, and the tests of each, in the order that this draws")


def drawn_order(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests with the files, and the tests of each file, in a random order."""
    drawn = random.Random(seed)
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    for tests in files:
        drawn.shuffle(tests)
    drawn.shuffle(files)
    return [test for tests in files for test in tests]


def processor_seconds() -> float:
    """Return what this process, its threads and its ended children have used."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def loop() -> float:
    """Return the processor time of a fixed computation: a busy or slow machine takes longer for it too."""
    start, total = processor_seconds(), 0
    for number in range(1_000_000):
        total += number * number % 7
    return processor_seconds() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail an unmarked test that uses more; its fixtures are not counted."""
    limit = item.config.getoption("processor_limit", None)
    is_judged = limit and not any(map(item.get_closest_marker, ("slow", "hypothesis")))
    imported = len(sys.modules)
    start = processor_seconds()
    yield
    used = processor_seconds() - start
    if not is_judged or used <= limit or len(sys.modules) - imported > MAX_NEW_MODULES:
        return
    used /= max(1.0, loop() / LOOP_SECONDS)
    if used > limit:
        pytest.fail(
            f"{item.name} used {used:.1f} s of a processor; a test of `make test` has {limit:g} s. Use a "
            "smaller model or fewer cases, share a fixture, or mark it `slow`: then `make test-all` alone runs it",
            pytrace=False,
        )
