"""One engine on several ranks: the leader (rank 0) talks to the caller and announces every step to the others.

Every rank must run the same forward passes in the same order, or they wait for each other for ever. So the leader runs
one step at a time and announces it first; the others run what was announced and nothing else. Only the leader chooses
tokens. A stream that is closed is not advanced any more, on any rank.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from rag_posfix.contracts.generator import shown_model
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice
from rag_posfix.errors import GenerationError, RagPosfixError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import CLOSING_SECONDS
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.tensor_parallel.messages import Advance, Command, End, Free, Prefill, decode, encode
from rag_posfix.patching.ranks import Ranks
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan

_log = logging.getLogger(__name__)


class WorkerGroup(Protocol):
    """The processes of the other ranks, as the first rank sees them."""

    def failure(self, patience_seconds: float = 0.0) -> str | None:
        """Return which of them ended, and how; None if none has by the end of the patience."""
        ...

    def kill(self) -> None:
        """End them at once; what waits for them fails."""
        ...

    def close(self) -> None:
        """Wait until they have ended, and clean up after them."""
        ...


class Channel:
    """Carries commands from the first rank to the others, as bytes of JSON.

    Args:
        ranks: Its ``control`` group is used.
    """

    BLOCK = 256
    """Bytes that are always sent: the length, and a short command whole."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def send(self, command: bytes) -> None:
        """Tell all other ranks what ``encode`` wrote; for the first rank."""
        data = len(command).to_bytes(8, "little") + command
        data = data.ljust(self.BLOCK, b" ")
        self._broadcast(bytearray(data[: self.BLOCK]))
        if len(data) > self.BLOCK:
            self._broadcast(bytearray(data[self.BLOCK :]))

    def receive(self) -> Command:
        """Return the next command; waits for it as long as it takes."""
        block = self._broadcast(bytearray(self.BLOCK), patient=True)
        length = int.from_bytes(block[:8], "little")
        data, missing = block[8 : 8 + length], length + 8 - self.BLOCK
        return decode(data + self._broadcast(bytearray(missing)) if missing > 0 else data)

    def _broadcast(self, data: bytearray, *, patient: bool = False) -> bytes:
        self._ranks.broadcast(torch.frombuffer(data, dtype=torch.uint8), patient=patient)
        return bytes(data)


def follow(engine: Engine, channel: Channel) -> None:
    """Do what the first rank tells until it says that it is over. Runs on every other rank."""
    sessions: dict[int, Session] = {}
    while True:
        command = channel.receive()
        if isinstance(command, End):
            return
        if isinstance(command, Free):
            sessions.pop(command.session, None)
        elif isinstance(command, Advance):
            sessions[command.session].advance(command.token)
        else:
            plan = engine.plan(command.layout, command.mitigation, command.max_tokens)
            try:
                sessions[command.session] = engine.prefill(command.layout, plan)
            except RagPosfixError as error:  # the first rank raises the same, and its caller gets it
                _log.debug("not read: %s", error)


class TensorParallelGenerator(DelegatingGenerator[Engine]):
    """Answers prompts with a model that is split over ranks. Implements ``Generator`` on the first rank.

    Several threads may call it, and streams may be open side by side: they take turns, a forward pass each.

    Args:
        engine: This rank's share of the model.
        channel: Reaches the other ranks.
        workers: The other ranks' processes.
    """

    def __init__(self, engine: Engine, channel: Channel, workers: WorkerGroup) -> None:
        super().__init__(engine)
        self._channel = channel
        self._workers = workers
        self._numbers = itertools.count()
        self._step_lock = threading.Lock()
        self._closed_sessions: deque[int] = deque()
        self._over: str | None = None

    @property
    def failure(self) -> str | None:
        """Why no request can be answered any more; None while all is well."""
        return self._over or self._workers.failure()

    def next_log_probs(self, layout: Layout, mitigation: MitigationChoice | None = None) -> Tensor:
        """Return the log-probabilities of the first token of the answer, (V,) float32."""
        choice = mitigation or MitigationChoice()
        plan = self._inner.plan(layout, choice, 1)
        with self._session(layout, choice, 1, plan) as (_, session):
            return session.next_log_probs()

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        """Yield the answer piece by piece; the last chunk carries the whole. Closing it stops all ranks.

        Errors that need no model raise here, before the other ranks hear of the request; as those of ``Engine.open``.

        Raises:
            GenerationError: a rank has ended, or the ranks fell out of step; no request can be answered any more.
            UnsupportedModelError: the request asks for the log-probabilities of the prompt.
        """
        if request.prompt_scored:
            raise UnsupportedModelError(
                f"{shown_model(self.model_id)} is split over several processes, which score no prompts; serve it with "
                "tp=1"
            )
        return self._stream(request, self._inner.plan(request.layout, request.mitigation, request.sampling.max_tokens))

    def _stream(self, request: GenerationRequest, plan: Plan) -> Iterator[Chunk]:
        with self._session(request.layout, request.mitigation, request.sampling.max_tokens, plan) as (number, session):

            def advance(token: int) -> None:
                with self._step(Advance(number, token)):
                    session.advance(token)

            yield from self._inner.resume(session, request, advance)

    def close(self) -> None:
        """Let the other ranks end; kill them if a step still runs after ``CLOSING_SECONDS``. Later requests fail."""
        idle = self._step_lock.acquire(timeout=CLOSING_SECONDS)
        try:
            if self._over is None:
                self._over = "it was closed"
                try:
                    if not idle:
                        raise RuntimeError(f"a step still runs after {CLOSING_SECONDS:g} s")
                    self._channel.send(encode(End()))
                except RuntimeError as error:
                    _log.warning("the other ranks could not be told to end: %s", error)
                    self._workers.kill()
        finally:
            if idle:
                self._step_lock.release()
        self._workers.close()

    @contextmanager
    def _session(
        self, layout: Layout, choice: MitigationChoice, max_tokens: int, plan: Plan
    ) -> Iterator[tuple[int, Session]]:
        """Hold a session that all ranks have opened, with its number."""
        number = next(self._numbers)
        with self._step(Prefill(number, layout, choice, max_tokens)):
            session = self._inner.prefill(layout, plan)
        try:
            yield number, session
        finally:
            # The end of an abandoned stream may run anywhere, even inside of another turn: it must not wait for one.
            self._closed_sessions.append(number)
            if self._step_lock.acquire(blocking=False):
                try:
                    self._free_sessions()
                finally:
                    self._step_lock.release()

    @contextmanager
    def _step(self, command: Command) -> Iterator[None]:
        """Tell the other ranks, and run the same here while no other turn runs."""
        told = encode(command)  # what cannot be sent is refused before anybody hears of it
        with self._step_lock:
            self._free_sessions()
            self._check()
            try:
                self._channel.send(told)
                yield
            except RagPosfixError:  # follows from the request, so that every rank raised it and is where this one is
                raise
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception):
                    self._check(error)
                raise
            self._check()

    def _free_sessions(self) -> None:
        """Let the other ranks forget sessions that are over here. For the thread whose turn it is."""
        try:
            while self._closed_sessions and self._over is None:
                self._channel.send(encode(Free(self._closed_sessions.popleft())))
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Answer nothing any more: the ranks are not where this one is."""
        if not isinstance(error, Exception):
            self._over = "it was interrupted in the middle of a step"
        else:
            said = " ".join(str(error).split())[:200]
            self._over = self._workers.failure(patience_seconds=2.0) or f"a step failed: {said}"
        self._workers.kill()

    def _check(self, cause: Exception | None = None) -> None:
        self._over = self.failure
        if self._over is not None:
            raise GenerationError(
                f"the model is split over several processes and cannot answer any more: {self._over}; start it again"
            ) from cause
