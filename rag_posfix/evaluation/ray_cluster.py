"""The connection of experiments to a Ray cluster: the one file of the library that imports Ray.

The process that connects is handed Ray's module, and calls it only inside the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rag_posfix.errors import EvaluationError, RagPosfixError, missing_extra


@contextmanager
def connected() -> Iterator[Any]:
    """Connect to Ray and yield its module; a cluster that was started here ends with the block.

    A process that is connected already stays connected. Otherwise Ray itself decides what to connect to: the cluster
    that ``RAY_ADDRESS`` names, or a new one on this machine.

    Raises:
        ConfigError: Ray is not installed.
        EvaluationError: the cluster cannot be reached or started.
    """
    ray = _import()
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
        except Exception as error:  # whatever Ray objects to, the user needs one line
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise EvaluationError(f"no Ray cluster: {reason}; check RAY_ADDRESS, or leave --ray out") from error
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def fetched(reference: Any) -> Any:
    """Return what a reference stands for, in a process of the cluster.

    Args:
        reference: Was handed over within a list or an object; Ray itself fetches those that are arguments.
    """
    import ray

    return ray.get(reference)


def found_there(ask: Callable[[], Any]) -> Any:
    """Return what a worker found; where it failed, its own error in one line.

    Raises:
        EvaluationError: the worker failed.
    """
    try:
        return ask()
    except Exception as error:  # Ray raises errors of classes that it makes at run time
        cause = getattr(error, "cause", error)
        if isinstance(cause, RagPosfixError):
            raise EvaluationError(str(cause)) from error
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise EvaluationError(f"a Ray worker failed ({type(cause).__name__}: {reason})") from error


def _import() -> Any:
    try:
        import ray
    except ImportError as error:
        raise missing_extra(str(error.name), "ray") from error
    return ray
