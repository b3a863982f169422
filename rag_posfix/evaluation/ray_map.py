"""Processes on a Ray cluster that hold a model each, and answer calls: the one file of the library that imports Ray.

The process that connects is handed Ray's module, and calls it only inside the connection.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rag_posfix.errors import EvaluationError, RagPosfixError, missing_extra

RESTARTS = 3
"""Maximum number of times that a call whose process died is made again."""

_STARTING = -1

RayMap = Callable[[str, Sequence[Sequence[Any]]], Iterator[tuple[int, Any]]]
"""Calls a method with each of a list of arguments; yields (index, result) as results come."""


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


class _Actor:
    """What a process on the cluster holds: an object that is made at the first call.

    Of an actor that cannot be made, Ray tells the reason only within a longer text.
    """

    def __init__(self, opener: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self._opened = functools.cache(lambda: opener(*arguments))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._opened(), method)(*arguments)


@contextmanager
def ray_map(ray: Any, count: int, opener: Callable[..., Any], *arguments: Any) -> Iterator[RayMap]:
    """Yield a map over processes of a cluster, each with one CPU and an object that ``opener`` makes there.

    Only processes that have started are called. A cluster that has no CPU for all of them answers with fewer. The call
    of a process that dies goes to the next that is free, and a new process is started: Ray itself would wait for the
    CPU that a process took which had none before.
    """
    remote = ray.remote(_Actor).options(num_cpus=1)
    actors = [remote.remote(opener, arguments) for _ in range(count)]

    def calls(method: str, argument_lists: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        waiting = deque(range(len(argument_lists)))
        deaths: Counter[int] = Counter()
        running = {actor.__ray_ready__.remote(): (_STARTING, actor) for actor in actors}
        remaining = len(argument_lists)
        while remaining:
            (done,), _ = ray.wait([*running], num_returns=1)
            index, actor = running.pop(done)
            try:
                result = _result(ray, done)
            except ray.exceptions.RayActorError as error:
                deaths[index] += 1
                if deaths[index] > RESTARTS:
                    raise EvaluationError(f"a Ray worker died {deaths[index]} times: {_first_line(error)}") from error
                if index != _STARTING:
                    waiting.appendleft(index)
                actors.remove(actor)
                actors.append(remote.remote(opener, arguments))
                running[actors[-1].__ray_ready__.remote()] = (_STARTING, actors[-1])
                continue
            if waiting:
                following = waiting.popleft()
                running[actor.call.remote(method, *argument_lists[following])] = (following, actor)
            if index != _STARTING:
                remaining -= 1
                yield index, result

    try:
        yield calls
    finally:
        for actor in actors:
            ray.kill(actor)


def _result(ray: Any, reference: Any) -> Any:
    """Return a result; where the process failed, raise its own error in one line, and Ray's where it died."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayActorError:
        raise
    except Exception as error:  # Ray raises errors of classes that it makes at run time
        cause = getattr(error, "cause", error)
        if isinstance(cause, RagPosfixError):
            raise EvaluationError(str(cause)) from error
        raise EvaluationError(f"a Ray worker failed ({type(cause).__name__}: {_first_line(cause)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
