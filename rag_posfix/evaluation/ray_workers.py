"""Processes on a Ray cluster that hold a model or an index each, and answer calls: the one file that imports Ray.

The process that connects is handed Ray's module, and calls it only inside the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rag_posfix.errors import EvaluationError, RagPosfixError, missing_extra

RESTARTS = 3
"""Maximum number of times that a process that dies is started again, with the call that it was answering."""


@contextmanager
def connect_ray() -> Iterator[Any]:
    """Connect to Ray and yield its module; a cluster that was started here ends with the block.

    A process that is connected already stays connected. Otherwise Ray itself decides what to connect to: the cluster
    that ``RAY_ADDRESS`` names, or a new one on this machine.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra(str(error.name), "eval,ray") from error
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
        except Exception as error:  # whatever Ray objects to, the user needs one line
            raise EvaluationError(
                f"no Ray cluster: {_first_line(error)}; check RAY_ADDRESS, or leave --ray out"
            ) from error
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def fetch(reference: Any) -> Any:
    """Return the value of a reference within a list or an object, in a process of the cluster.

    Ray itself fetches those that are arguments.
    """
    import ray

    return ray.get(reference)


class RayWorkers:
    """Processes that are called by the name of a method. Each answers one call at a time.

    Only processes that have started are called. A cluster that has no CPU for all of them answers with fewer.
    """

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self._actors = actors

    def put(self, value: Any) -> Any:
        """Return a reference to ``value``, which is copied to the cluster once, for several calls."""
        return self._ray.put(value)

    def call_for_reference(self, method: str, *arguments: Any) -> Any:
        """Call a method once; return a reference to the result, which stays on the cluster.

        A failure is raised by what uses the reference.
        """
        return next(self._finished(method, [arguments]))[1]

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method once and return the result."""
        return next(self.each(method, [arguments]))[1]

    def each(self, method: str, calls: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of every call as results come.

        Args:
            calls: The arguments of each call. Ray replaces references by values, but not within lists or objects.
        """
        for index, reference in self._finished(method, calls):
            yield index, self._get(reference)

    def batches(self, method: str, items: Sequence[Any], size: int, *more: Any) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of every item, from calls with a list of ``size`` items and ``more``."""
        starts = range(0, len(items), size)
        for number, results in self.each(method, [(items[start : start + size], *more) for start in starts]):
            yield from enumerate(results, start=starts[number])

    def _finished(self, method: str, calls: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        waiting = iter(enumerate(calls))
        starting = {actor.__ray_ready__.remote(): actor for actor in self._actors}
        running: dict[Any, tuple[int, Any]] = {}
        remaining = len(calls)
        while remaining:
            (done,), _ = self._ray.wait([*starting, *running], num_returns=1)
            finished = None
            if done in starting:
                actor = starting.pop(done)
                self._get(done)
            else:
                finished, actor = running.pop(done)
            if (call := next(waiting, None)) is not None:
                index, arguments = call
                running[getattr(actor, method).remote(*arguments)] = (index, actor)
            if finished is not None:
                remaining -= 1
                yield finished, done

    def _get(self, reference: Any) -> Any:
        """Return a result; where the worker failed, raise its own error in one line."""
        try:
            return self._ray.get(reference)
        except Exception as error:  # Ray raises errors of classes that it makes at run time
            cause = getattr(error, "cause", error)
            if isinstance(cause, RagPosfixError):
                raise EvaluationError(str(cause)) from error
            raise EvaluationError(f"a Ray worker failed ({type(cause).__name__}: {_first_line(cause)})") from error


@contextmanager
def ray_workers(worker: type, arguments: Sequence[Any], count: int) -> Iterator[RayWorkers]:
    """Connect to Ray and yield processes, which end with the block.

    Args:
        worker: The class of which each process holds an object. It should load models at the first call, and not when
            it is made: of an object that cannot be made, Ray tells the reason only within a longer text.
    """
    with connect_ray() as ray:
        remote = ray.remote(worker).options(num_cpus=1, max_restarts=RESTARTS, max_task_retries=RESTARTS)
        actors = [remote.remote(*arguments) for _ in range(count)]
        try:
            yield RayWorkers(ray, actors)
        finally:
            for actor in actors:
                ray.kill(actor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
