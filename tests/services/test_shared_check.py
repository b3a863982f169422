"""A check that many ask for at the same time runs once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import anyio
import pytest

from rag_posfix_api.http.errors import RequestError
from rag_posfix_api.runtime.service import SharedCheck
from tests.support.clock import Clock


def counted(gate: threading.Event, calls: list[int], problem: str | None = None) -> Callable[[], None]:
    def check() -> None:
        calls.append(len(calls))
        assert gate.wait(20)
        if problem is not None:
            raise RequestError(problem)

    return check


async def test_sixty_callers_share_one_run_and_its_error():
    gate, calls, errors = threading.Event(), list[int](), list[str]()
    check = SharedCheck(counted(gate, calls, "gone"), 20, "the store", Clock())

    async def ask() -> None:
        with pytest.raises(RequestError) as caught:
            await check.wait()
        errors.append(str(caught.value))

    async with anyio.create_task_group() as group:
        for _ in range(60):
            group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        gate.set()
    assert (len(calls), errors) == (1, ["gone"] * 60)


async def test_a_run_that_hangs_is_not_started_again():
    gate, calls = threading.Event(), list[int]()
    check = SharedCheck(counted(gate, calls), 0.01, "the store", Clock())
    try:
        for _ in range(5):
            with pytest.raises(RequestError, match="the store does not answer within"):
                await check.wait()
        assert len(calls) == 1
    finally:
        gate.set()


async def test_a_result_holds_for_a_second():
    gate, calls, clock = threading.Event(), list[int](), Clock()
    gate.set()
    check = SharedCheck(counted(gate, calls), 20, "the store", clock)
    for seconds, expected in ((0.0, 1), (0.9, 1), (0.1, 2), (0.5, 2), (1.0, 3)):
        clock.advance(seconds)
        await check.wait()
        assert len(calls) == expected
