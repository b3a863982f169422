"""How much a generator read, whoever asked it: forward passes and their tokens, counted at the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Work", "counted"]


@dataclass(slots=True)
class Work:
    """What was counted.

    Attributes:
        forward_passes: Calls of the model.
        tokens: Tokens in them, padding included.
    """

    forward_passes: int = 0
    tokens: int = 0


@contextmanager
def counted(generator: object | None) -> Iterator[Work]:
    """Count what the model of ``generator`` reads inside the block; nothing where it has no model of this process.

    Args:
        generator: An engine, another generator, or None.
    """
    work = Work()
    model = getattr(getattr(generator, "loaded", None), "model", None)
    if model is None:
        yield work
        return

    def count(_module: Any, _arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        read = named.get("input_ids")
        work.forward_passes += 1
        work.tokens += 0 if read is None else int(read.numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()
