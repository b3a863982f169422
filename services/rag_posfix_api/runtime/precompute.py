"""Precomputes the keys and values of collections in the background, one collection after the other.

Each batch of passages takes a permit like an answer does, so questions wait for one batch at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import GenerationCancelled, OverloadedError, RagPosfixError
from rag_posfix.pipeline.precompute import PassageKVStore, PassagePrecomputer
from rag_posfix.plan.layout import Layout
from rag_posfix_api.http.errors import ConflictError, kind_of, log_failure
from rag_posfix_api.runtime.admission import Admission

Progress = Callable[[int, int], None]

_one_thread = partial(ThreadPoolExecutor, 1, thread_name_prefix="precompute")
_BATCH_SECONDS = 600.0
PAUSE_SECONDS = 0.5
"""How long a batch waits before it asks a full service again."""


@dataclass(frozen=True, slots=True)
class PrecomputeState:
    """How far a job is.

    Attributes:
        status: ``none`` before the first job, then ``queued``, ``running``, ``done``, ``cancelled`` or ``failed``.
        done: Documents whose keys and values are stored.
        documents: Documents that are to be read; 0 until they were counted.
        tokens: Tokens that had to be computed; known at the end.
        error: Why it failed.
    """

    status: Literal["none", "queued", "running", "done", "cancelled", "failed"] = "queued"
    done: int = 0
    documents: int = 0
    tokens: int | None = None
    error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ("done", "cancelled", "failed")


class PrecomputeJobs:
    """Jobs by key, one of them running at a time. The last state of each is kept."""

    def __init__(self) -> None:
        self._pool = _one_thread()
        self._lock = threading.Lock()
        self._states: dict[Hashable, PrecomputeState] = {}
        self._cancelled: dict[Hashable, threading.Event] = {}

    def start(self, key: Hashable, work: Callable[[Progress, threading.Event], int]) -> PrecomputeState:
        """Queue a job; raise ``ConflictError`` while a job with this key has not ended.

        ``work`` gets a function for its progress and an event that says to end, and returns the number of tokens.
        """
        with self._lock:
            previous = self._states.get(key)
            if previous is not None and not previous.ended:
                raise ConflictError("a job for this collection is running; wait until it ends, or cancel it")
            cancelled = self._cancelled[key] = threading.Event()
            state = self._states[key] = PrecomputeState()
            self._pool.submit(self._run, key, work, cancelled)
        return state

    def state(self, key: Hashable) -> PrecomputeState | None:
        """Return the state of the last job with this key, or None."""
        with self._lock:
            return self._states.get(key)

    def cancel(self, key: Hashable) -> PrecomputeState | None:
        """End a job after its current batch; return its state, or None if there was none."""
        with self._lock:
            state, cancelled = self._states.get(key), self._cancelled.get(key)
        if cancelled is not None:
            cancelled.set()
        return state

    def forget(self, key: Hashable) -> None:
        """End a job, and forget its state."""
        self.cancel(key)
        with self._lock:
            self._states.pop(key, None)

    def close(self) -> None:
        """End all jobs after their current batch, and wait for that; later jobs have a thread of their own."""
        with self._lock:
            pool, self._pool = self._pool, _one_thread()
            for event in self._cancelled.values():
                event.set()
        pool.shutdown()  # queued jobs run too, and note that they were cancelled

    def _run(
        self, key: Hashable, work: Callable[[Progress, threading.Event], int], cancelled: threading.Event
    ) -> None:
        def progress(done: int, documents: int) -> None:
            self._change(key, cancelled, done=done, documents=documents)
            if cancelled.is_set():
                raise GenerationCancelled("the job was cancelled")

        try:
            if cancelled.is_set():
                raise GenerationCancelled("the job was cancelled")
            self._change(key, cancelled, status="running")
            tokens = work(progress, cancelled)
            self._change(key, cancelled, status="done", tokens=tokens)
        except GenerationCancelled:
            self._change(key, cancelled, status="cancelled")
        except Exception as error:
            kind = kind_of(error)
            if not isinstance(error, RagPosfixError) or kind.status >= 500:
                log_failure(error)
            self._change(key, cancelled, status="failed", error=kind.message or " ".join(str(error).split()))

    def _change(self, key: Hashable, job: threading.Event, **fields: object) -> None:
        with self._lock:
            state = self._states.get(key)
            if state is not None and self._cancelled.get(key) is job:
                self._states[key] = replace(state, **fields)  # type: ignore[arg-type]


class AdmittedPrecomputer:
    """A ``PassagePrecomputer`` that takes a permit for each batch, and stops when ``cancelled`` is set."""

    def __init__(
        self, engine: PassagePrecomputer, admission: Admission, cancelled: threading.Event, tenant: str = ""
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._cancelled = cancelled
        self._tenant = tenant

    @property
    def encoder(self) -> TokenEncoder:
        return self._engine.encoder

    @property
    def context_window(self) -> int:
        return self._engine.context_window

    @property
    def passages(self) -> PassageKVStore | None:
        return self._engine.passages

    @property
    def kv_bytes_per_token(self) -> int:
        return self._engine.kv_bytes_per_token

    def precompute(
        self, layout: Layout, mitigation: MitigationChoice, salt: str = "", kv_position: int | None = None
    ) -> int:
        """Compute one batch; while the service is full, try again.

        Raises:
            GenerationCancelled: the job was cancelled, or the service stops.
        """
        while not self._cancelled.is_set():
            try:
                with self._admission.admit(_BATCH_SECONDS) as ticket:
                    ticket.tenant = self._tenant
                    self._admission.acquire(ticket)
                    return self._engine.precompute(layout, mitigation, salt, kv_position)
            except OverloadedError:
                time.sleep(PAUSE_SECONDS)
        raise GenerationCancelled("the job was cancelled")
