"""The device twin changes a whole process, so it has its own: tests send it functions and get plain data back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.support.twin_engines import Readings, read_on_both, start

PATIENCE_SECONDS = 250


@pytest.fixture(scope="session")
def on_twin() -> Iterator[Callable[..., Any]]:
    """Return a function that calls a function of a module with arguments, in the process of the twin."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning, initializer=start) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(PATIENCE_SECONDS)


@pytest.fixture(scope="session")
def on_both(on_twin: Callable[..., Any]) -> Callable[..., Readings]:
    """Return a function that runs an action on the CPU and on the twin; see ``read_on_both``."""
    return lambda action, *arguments: on_twin(read_on_both, action, *arguments)
