"""Requests for the scheduler, drawn or started one after another."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.mitigations import MITIGATIONS
from tests.support.tiny import toy_layout
from tests.support.waiting import wait_until

RELEVANCE = (0.9, 0.2, 0.5, 0.4)


CLOSING_SECONDS = 60
"""Enough on a busy machine; a generator that takes longer hangs."""


class DaemonThreads:
    """What ``ThreadPoolExecutor`` does, but nothing waits for a call that never returns."""

    def submit(self, function, *arguments):
        future = Future()

        def run():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def threads():
    """The threads that run models."""
    return {thread for thread in threading.enumerate() if thread.name == "rag-posfix-generation"}


def start_all(pool, generator, requests):
    """Ask for answers one after another, each in a thread of its own."""
    futures = []
    for request in requests:
        before = generator.waiting
        futures.append(pool.submit(generator.generate, request))
        wait_until(lambda before=before: generator.waiting == before + 1)
    return futures


def drawn(rng):
    """A random request: any method, any prompt, greedy or sampled."""
    name = rng.choice(MITIGATIONS.names())
    return GenerationRequest(
        toy_layout(rng.choice([(7, 4, 9, 6), (3, 5, 4, 2)]), seed=rng.randrange(3), relevance=RELEVANCE),
        MitigationChoice(name, dict(MITIGATIONS.get(name).example)),
        Sampling(
            max_tokens=rng.randint(1, 9),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(100),
            stop=rng.choice([(), ("7",)]),
        ),
    )
