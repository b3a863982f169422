"""What a replica does: it holds the model, answers requests, and says which passages it holds. No Ray is imported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk
from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.requests import SteppedGenerator
from rag_posfix_api.ray_serve.routed_request import RoutedRequest
from rag_posfix_api.ray_serve.sketch import MOST_MARKS, ReadPassages, tags_of


@runtime_checkable
class HeldPassages(Protocol):
    """The passage KV store, as a replica sees it. ``caching.kv.store.PassageStore`` implements it."""

    def tags_at_hand(self) -> frozenset[str]:
        """Return the tags of the entries in memory."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the counts of the store."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaModel:
    """A loaded model.

    Attributes:
        generator: Answers.
        passages: Keeps keys and values for it; None where that is not known.
    """

    generator: Generator
    passages: HeldPassages | None = None


class GeneratorReplica:
    """Answers requests with a model of its own. Ray Serve makes one per replica and calls its coroutines.

    Args:
        opener: Loads the model, in the process of the replica and by its settings.
        at_once: Answers that share the decode steps of the model.
        waiting: Further requests that may wait for it.
    """

    def __init__(
        self,
        opener: Callable[[], ReplicaModel],
        at_once: int,
        waiting: int = 32,
        most_marks: int = MOST_MARKS,
    ) -> None:
        opened = opener()
        self._passages = opened.passages
        self._described = opened.generator
        self._generator = _batched(opened.generator, at_once)
        self._read = ReadPassages(most_marks)
        # A thread waits for each answer; the event loop stays free for the queue length, the sketch and the health.
        self._threads = ThreadPoolExecutor(at_once + waiting, thread_name_prefix="answer")

    async def stream(self, routed: RoutedRequest) -> AsyncIterator[Chunk]:
        """Yield the answer in pieces. When the caller goes away, the work stops at its next step.

        Raises:
            RagPosfixError: as ``Generator.stream``.
        """
        self._read.add(tags_of(routed.request))
        chunks = self._generator.stream(routed.request)
        step = self._threads.submit(next, chunks, None)
        try:
            while (chunk := await asyncio.wrap_future(step)) is not None:
                yield chunk
                step = self._threads.submit(next, chunks, None)
        finally:
            step.add_done_callback(lambda done: self._ended(done, chunks))

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the sketch of the passages in memory; Ray Serve sends it to the routers."""
        held = None if self._passages is None else self._passages.tags_at_hand()
        return self._read.sketch(held, time.time()).as_stats()

    async def counts(self) -> dict[str, Any]:
        """Return the counts of the passage KV store; empty without one."""
        return {} if self._passages is None else self._passages.stats()

    async def check_health(self) -> None:
        """Raise if the model cannot answer any more; Ray Serve then replaces the replica.

        Raises:
            GenerationError: a process of a split model died.
        """
        died: str | None = getattr(self._described, "failure", None)
        if died is not None:
            raise GenerationError(f"the model cannot answer any more: {died}")

    def _ended(self, step: Future[Chunk | None], chunks: Iterator[Chunk]) -> None:
        """Close an answer after its last step, in the thread of that step; what that raised was raised already."""
        close = getattr(chunks, "close", None)
        if close is not None:
            close()


def _batched(generator: Generator, at_once: int) -> Generator:
    if at_once == 1 or not isinstance(generator, SteppedGenerator):
        return generator
    from rag_posfix.generation.batching.scheduler import BatchingGenerator  # torch

    return BatchingGenerator(generator, at_once)
