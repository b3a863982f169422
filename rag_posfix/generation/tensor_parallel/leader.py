"""One engine on several ranks: the leader (rank 0) talks to the caller and announces every step to the workers.

Every rank must run the same forward passes in the same order, or they wait for each other for ever. So the leader runs
one step at a time and announces it first; workers run the announced steps only. Only the leader chooses tokens. A
stream that is closed is not advanced any more, on any rank. The processes of the other ranks are started, watched and
ended here.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rag_posfix.contracts.generator import DelegatingGenerator, display_name
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice
from rag_posfix.errors import ConfigError, GenerationError, RagPosfixError, UnsupportedModelError
from rag_posfix.generation.batching.scheduler import CLOSING_SECONDS
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.layout import Layout, Span, Turn
from rag_posfix.plan.plan import Plan

ENDING_SECONDS = 10.0
MAX_LOG_BYTES = 1 << 14


def _do_nothing() -> None:
    """The default of ``on_failure`` and ``on_close``."""


class Processes:
    """Programs that run while this one does.

    torchrun ends its whole tree with one process and cannot end it with its own parent, so that they are started here:
    each holds the reading end of a pipe whose other end is here, and detects the exit of this process, however it
    ended. Ctrl-C does not reach them: this process ends them. If one ends by itself, all are ended.

    Args:
        commands: Arguments of the interpreter, one list for each program; the first is rank 1.
        folder: Shared by the programs; removed by ``close``.
        variables: Environment variables that they inherit.
        on_failure: Called in a thread when one has ended by itself, while the other programs are being ended.
        on_close: Called at the beginning of ``close``.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path | None,
        variables: Mapping[str, str],
        on_failure: Callable[[], None] = _do_nothing,
        on_close: Callable[[], None] = _do_nothing,
    ) -> None:
        self._folder = folder
        self._on_failure, self._on_close = on_failure, on_close
        self._count = len(commands) + 1
        self._changed = threading.Condition()
        self._ending = False
        self._failure: str | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        # Also at the end of the interpreter, if nobody has called `close`.
        self._end = weakref.finalize(self, _end, self._running, folder)
        # They find their modules where this process does; -P leaves the current folder out.
        inherited = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            for rank, command in enumerate(commands, start=1):
                with self._log_of(rank).open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", *command],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        env={**inherited, "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                self._running.append(process)
                threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        except OSError:
            self._ending = True
            self._end()
            raise

    @staticmethod
    def shared_folder() -> Path:
        """Return a new folder that only this user can read."""
        return Path(tempfile.mkdtemp(prefix="rag-posfix-ranks-"))

    def failure(self, patience_seconds: float = 0.0) -> str | None:
        """Return which one ended by itself, and how; None if none has by the end of the patience."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, patience_seconds)
            return self._failure

    def kill(self) -> None:
        """End them all at once; what waits for them fails."""
        with self._changed:
            self._ending = True
        for process in self._running:
            process.kill()

    def close(self) -> None:
        """Wait for them to end, at most ten seconds, and remove what they shared."""
        with self._changed:
            self._ending = True
        self._on_close()
        deadline = time.monotonic() + ENDING_SECONDS
        for process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
        self._end()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._changed:
            if self._ending:
                return
            self._ending = True
            last_line = self._last_line(rank)
            self._failure = f"the process of rank {rank} of {self._count} ended with exit code {code}{last_line}"
            self._changed.notify_all()
        for other in self._running:
            other.kill()
        self._on_failure()

    def _last_line(self, rank: int) -> str:
        """Return the last line that a process wrote, to follow its exit code."""
        try:
            lines = self._log_of(rank).read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last[:300]})" if last else ""

    def _log_of(self, rank: int) -> Path:
        return (self._folder or Path()) / f"rank-{rank}.log"


def _end(running: Sequence[subprocess.Popen[bytes]], folder: Path | None) -> None:
    for process in running:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


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
    """Answers prompts with a model that is split over ranks; on the first rank.

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
    def failure(self) -> str | None:  # type: ignore[override]
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
                f"{display_name(self.model_id)} is split over several processes, which score no prompts; serve it "
                "with tp=1"
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
