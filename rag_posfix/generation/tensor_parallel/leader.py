"""One engine on several ranks: the leader (rank 0) talks to the caller and announces every step to the workers.

Every rank must run the same forward passes in the same order, or they wait for each other for ever. So the leader runs
one step at a time and announces it first; workers run the announced steps only. Only the leader chooses tokens. A
stream that is closed is not advanced any more, on any rank.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rag_posfix.contracts.generator import shown_model
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice
from rag_posfix.errors import ConfigError, GenerationError, RagPosfixError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import CLOSING_SECONDS
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.delegating import DelegatingGenerator
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.tensor_parallel.processes import Processes
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.layout import Layout, Span, Turn
from rag_posfix.plan.plan import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill a prompt: opens the session with this number, after which ``max_tokens`` may be generated."""

    session: int
    layout: Layout
    mitigation: MitigationChoice
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Append a token to a session."""

    session: int
    token: int


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a session."""

    session: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop."""


Command: TypeAlias = Prefill | Advance | Free | End


def encode(command: Command) -> bytes:
    """Return a command as JSON: nothing that is received is ever unpickled.

    Raises:
        ConfigError: a parameter of the mitigation is none of JSON's types.
    """
    try:
        return json.dumps({"do": type(command).__name__, "with": command}, default=_json_value).encode()
    except TypeError as error:
        name = command.mitigation.name if isinstance(command, Prefill) else type(command).__name__
        raise ConfigError(
            f"the parameters of {name} cannot be sent to the other ranks: {error}; give numbers, text, lists, None"
        ) from error


def decode(data: bytes) -> Command:
    """Return the command that ``encode`` wrote."""
    message = json.loads(data)
    kind, payload = message["do"], message["with"]
    if kind == "Prefill":
        choice = MitigationChoice(payload["mitigation"]["name"], payload["mitigation"]["parameters"])
        return Prefill(payload["session"], _layout(payload["layout"]), choice, payload["max_tokens"])
    if kind == "Advance":
        return Advance(**payload)
    return Free(**payload) if kind == "Free" else End()


def _json_value(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):  # parameters may be any mapping
        return dict(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{value!r} is none of JSON's types")


def _layout(payload: Mapping[str, Any]) -> Layout:
    relevance = payload["relevance"]
    return Layout(
        token_ids=tuple(payload["token_ids"]),
        prefix=Span(**payload["prefix"]),
        passages=tuple(Span(**span) for span in payload["passages"]),
        texts=tuple(Span(**span) for span in payload["texts"]),
        suffix=Span(**payload["suffix"]),
        question=Span(**payload["question"]),
        keys=tuple(payload["keys"]),
        relevance=None if relevance is None else tuple(relevance),
        turns=tuple(Turn(turn["role"], Span(**turn["content"])) for turn in payload["turns"]),
    )


class Channel:
    """Sends the first rank's commands to the workers, as bytes of JSON, in the ``control`` group of ``ranks``."""

    BLOCK = 256
    """Bytes that are always sent: the length, and a short command whole."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def send(self, command: bytes) -> None:
        """Send to all other ranks what ``encode`` wrote; for the first rank."""
        data = len(command).to_bytes(8, "little") + command
        data = data.ljust(self.BLOCK, b" ")
        self._broadcast(bytearray(data[: self.BLOCK]))
        if len(data) > self.BLOCK:
            self._broadcast(bytearray(data[self.BLOCK :]))

    def receive(self) -> Command:
        """Return the next command; waits for it as long as it takes."""
        block = self._broadcast(bytearray(self.BLOCK), no_timeout=True)
        length = int.from_bytes(block[:8], "little")
        data, missing = block[8 : 8 + length], length + 8 - self.BLOCK
        return decode(data + self._broadcast(bytearray(missing)) if missing > 0 else data)

    def _broadcast(self, data: bytearray, *, no_timeout: bool = False) -> bytes:
        self._ranks.broadcast(torch.frombuffer(data, dtype=torch.uint8), no_timeout=no_timeout)
        return bytes(data)


def run_worker(engine: Engine, channel: Channel) -> None:
    """Run the first rank's commands until ``End``; on every other rank."""
    sessions: dict[int, Session] = {}
    while not isinstance(command := channel.receive(), End):
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
        workers: The other ranks' processes, as far as this process started them.
    """

    def __init__(self, engine: Engine, channel: Channel, workers: Processes) -> None:
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
        """Send a command to the other ranks, and run the same here while no other turn runs."""
        message = encode(command)  # an error of it is raised before any rank hears of the command
        with self._step_lock:
            self._free_sessions()
            self._check()
            try:
                self._channel.send(message)
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
            reason = " ".join(str(error).split())[:200]
            self._over = self._workers.failure(patience_seconds=2.0) or f"a step failed: {reason}"
        self._workers.kill()

    def _check(self, cause: Exception | None = None) -> None:
        self._over = self.failure
        if self._over is not None:
            raise GenerationError(
                f"the model is split over several processes and cannot answer any more: {self._over}; start it again"
            ) from cause
