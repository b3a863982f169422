"""Runs work in several threads at once, with a time limit, so that a test of threads that wait for ever fails soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def in_threads(
    work: Callable[[Argument], Result], arguments: Iterable[Argument], seconds: float = 60.0
) -> list[Result]:
    """Return ``work(argument)`` of each argument, in their order. Each runs in a thread, and all begin together.

    Raises what one of them raised, or AssertionError if they are not done after ``seconds``.
    """
    given = list(arguments)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(len(given))

    def run(number: int, argument: Argument) -> None:
        try:
            start.wait()
            results[number] = work(argument)
        except BaseException as error:
            errors.append(error)

    # Daemons: threads that hang do not keep the process alive.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(given)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = sum(thread.is_alive() for thread in threads)
    assert not hanging, f"{hanging} of {len(threads)} threads are not done after {seconds} s"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(given))]
