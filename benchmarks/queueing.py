"""Waiting times of a queue with several servers: formulas, and a simulation that they are checked with.

Arrivals are a Poisson process of ``rate`` requests/s. A service has ``slots`` places (``max_concurrent``). A request
holds one for ``mean`` seconds on average, with the squared coefficient of variation ``variation`` = Var(S) / E(S)^2:
0 for equal times, 1 for exponential ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

__all__ = ["erlang_c", "mean_wait", "simulated_wait"]


def erlang_c(slots: int, load: float) -> float:
    """Return the probability that an arrival waits, in a queue of Poisson arrivals and exponential times (M/M/c).

    Source: Erlang (1917). With the probability of loss B(0) = 1, B(n) = load B(n-1) / (n + load B(n-1)), it is
    C = slots B / (slots - load (1 - B)).

    Args:
        slots: Servers, >= 1.
        load: rate * mean, in servers that are busy on average; from ``slots`` on every arrival waits.
    """
    if load >= slots:
        return 1.0
    loss = 1.0
    for number in range(1, slots + 1):
        loss = load * loss / (number + load * loss)
    return slots * loss / (slots - load * (1 - loss))


def mean_wait(rate: float, mean: float, slots: int, variation: float = 1.0) -> float:
    """Return the mean seconds before a request gets a slot (M/G/c), infinite if the queue grows without end.

    Source: Allen (1990), the approximation of Allen and Cunneen: W = C(slots, rate mean) / (slots / mean - rate) times
    (1 + variation) / 2. Exact for M/M/c and for one slot (Pollaczek and Khinchine).

    Args:
        rate: Requests per second.
        mean: Mean seconds that a request holds a slot.
        slots: Requests that are served at the same time.
        variation: Var(S) / E(S)^2 of the seconds.
    """
    if rate * mean >= slots:
        return float("inf")
    return erlang_c(slots, rate * mean) / (slots / mean - rate) * (1 + variation) / 2


def simulated_wait(rate: float, seconds: Sequence[float], slots: int, seed: int = 0) -> float:
    """Return the mean wait of requests that hold a slot for ``seconds``, in order, after Poisson arrivals."""
    draw = random.Random(seed)
    free = [0.0] * slots
    now = waited = 0.0
    for each in seconds:
        now += draw.expovariate(rate)
        start = max(now, heapq.heappop(free))
        waited += start - now
        heapq.heappush(free, start + each)
    return waited / len(seconds)
