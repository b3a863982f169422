"""The queueing formula against the HTTP service: Poisson arrivals, and a generator that sleeps for known times."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from benchmarks.queueing import mean_wait, simulated_wait
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.fake import FakeGenerator
from tests.support.serving import BRIDGE, CHAT, chat, make_pipeline, serving
from tests.support.toy_encoder import ToyEncoder

__all__ = ["SleepingGenerator", "check_queue"]


class SleepingGenerator(FakeGenerator):
    """Holds its slot for the next of ``seconds``.

    Args:
        seconds: One for each request, in the order in which they get their slots.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(ToyEncoder())
        self._seconds = iter(seconds)
        self._lock = threading.Lock()
        self.held: list[float] = []

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Sleep, then answer."""
        started = time.perf_counter()
        with self._lock:
            seconds = next(self._seconds)
        try:
            time.sleep(seconds)
            yield from super().stream(request)
        finally:
            with self._lock:
                self.held.append(time.perf_counter() - started)


async def _ask_all(url: str, gaps: Sequence[float]) -> list[float]:
    """Send a request after each gap and return the seconds until each response."""
    async with httpx2.AsyncClient(timeout=120, limits=httpx2.Limits(max_connections=None)) as client:

        async def ask(number: int) -> float:
            started = time.perf_counter()
            response = await client.post(url + CHAT, json=chat(f"question {number}", documents=[BRIDGE]))
            response.raise_for_status()
            return time.perf_counter() - started

        running = []
        for number, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            running.append(asyncio.create_task(ask(number)))
        return list(await asyncio.gather(*running))


def check_queue(requests: int = 600, slots: int = 4, mean: float = 0.4, load: float = 0.7) -> dict[str, Any]:
    """Return measured and predicted seconds of a response, for equal and for exponential times.

    Args:
        requests: Requests of each run.
        slots: ``max_concurrent`` of the service.
        mean: Mean seconds of a request in its slot.
        load: Share of the slots that are busy on average.
    """
    return {
        name: _run(requests, slots, mean, load, variation)
        for name, variation in (("equal", 0.0), ("exponential", 1.0))
    }


def _run(requests: int, slots: int, mean: float, load: float, variation: float) -> dict[str, Any]:
    draw = random.Random(1)
    rate = load * slots / mean
    seconds = [draw.expovariate(1 / mean) if variation else mean for _ in range(requests)]
    gaps = [draw.expovariate(rate) for _ in range(requests)]
    generator = SleepingGenerator(seconds)
    limits = {"max_concurrent": slots, "max_queue": requests, "max_open": 2 * requests, "queue_timeout_seconds": 600}
    with serving(make_pipeline(generator), **limits) as url:
        measured = statistics.fmean(asyncio.run(_ask_all(url, gaps)))
    # What was drawn and held, not what was meant: a finite sample differs from its distribution, a sleep is a little
    # longer than asked for.
    held = statistics.fmean(generator.held)
    drawn_rate = requests / sum(gaps)
    drawn_variation = statistics.pvariance(generator.held) / held**2
    predicted = held + mean_wait(drawn_rate, held, slots, drawn_variation)
    return {
        "requests": requests,
        "slots": slots,
        "load": round(drawn_rate * held / slots, 3),
        "mean_service_s": round(held, 4),
        "variation": round(drawn_variation, 3),
        "predicted_response_s": round(predicted, 4),
        "measured_response_s": round(measured, 4),
        "measured_to_predicted": round(measured / predicted, 3),
        "simulated_response_s": round(held + simulated_wait(drawn_rate, generator.held * 50, slots), 4),
    }
