import asyncio
import threading

import pytest

from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.errors import GenerationCancelled, RerankingTimeoutError
from rag_posfix.reranking.deadline import check_deadline, deadline


def test_the_shortest_of_nested_deadlines_counts_until_its_end():
    with deadline(60), deadline(-1.0), pytest.raises(RerankingTimeoutError, match="longer than its deadline"):
        check_deadline()
    check_deadline()


async def test_a_thread_has_the_deadlines_of_its_caller():
    with deadline(-1.0), pytest.raises(RerankingTimeoutError, match="longer than its deadline"):
        await run_until_cancelled(check_deadline)
    assert await run_until_cancelled(lambda: 7) == 7


async def test_a_cancelled_call_stops_its_thread_at_the_next_check():
    started, release, stopped = threading.Event(), threading.Event(), threading.Event()

    def work():
        started.set()
        release.wait(60)
        try:
            check_deadline()
        except GenerationCancelled:
            stopped.set()
            raise

    task = asyncio.create_task(run_until_cancelled(work))
    await asyncio.to_thread(started.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert await asyncio.to_thread(stopped.wait, 60)
