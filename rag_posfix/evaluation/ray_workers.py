"""Processes on a Ray cluster that hold a model or an index each, and answer calls. Knows nothing of what they do."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rag_posfix.evaluation.ray_cluster import found_there

RESTARTS = 3
"""A process that dies is started again so often, with the call that it was answering."""


class RayWorkers:
    """Processes that are called by the name of a method. Each answers one call at a time.

    Only processes that have started are called. A cluster that has no room for all of them answers with fewer.
    """

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self._actors = actors

    def put(self, value: Any) -> Any:
        """Return a reference to ``value``, which is copied to the cluster once.

        Args:
            value: What several calls need.
        """
        return self._ray.put(value)

    def kept(self, method: str, *arguments: Any) -> Any:
        """Call a method once; return a reference to the result, which stays on the cluster.

        A failure is raised by what uses the reference.
        """
        return next(self._answered(method, [arguments]))[1]

    def one(self, method: str, *arguments: Any) -> Any:
        """Call a method once and return the result.

        Raises:
            EvaluationError: the call failed.
        """
        return next(self.each(method, [arguments]))[1]

    def each(self, method: str, calls: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of every call as results come.

        Args:
            calls: The arguments of each call; a reference stands for its value, but not within a list or an object.

        Raises:
            EvaluationError: a call failed, or its process died more often than ``RESTARTS``.
        """
        for index, reference in self._answered(method, calls):
            yield index, found_there(functools.partial(self._ray.get, reference))

    def _answered(self, method: str, calls: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        waiting = iter(enumerate(calls))
        starting = {actor.__ray_ready__.remote(): actor for actor in self._actors}
        running: dict[Any, tuple[int, Any]] = {}
        remaining = len(calls)
        while remaining:
            (done,), _ = self._ray.wait([*starting, *running], num_returns=1)
            finished = None
            if done in starting:
                actor = starting.pop(done)
                found_there(functools.partial(self._ray.get, done))
            else:
                finished, actor = running.pop(done)
            if (call := next(waiting, None)) is not None:
                index, arguments = call
                running[getattr(actor, method).remote(*arguments)] = (index, actor)
            if finished is not None:
                remaining -= 1
                yield finished, done


@contextmanager
def ray_workers(ray: Any, made: type, arguments: Sequence[Any], count: int) -> Iterator[RayWorkers]:
    """Yield processes, which end with the block.

    Args:
        made: The class of which each process holds an object. It should load models at the first call, and not when
            it is made: of an object that cannot be made, Ray tells the reason only within a longer text.
        count: Number of processes, each with one CPU.
    """
    remote = ray.remote(made).options(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)
    actors = [remote.remote(*arguments) for _ in range(count)]
    try:
        yield RayWorkers(ray, actors)
    finally:
        for actor in actors:
            ray.kill(actor)
