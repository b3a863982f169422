"""Requests between two decode steps: the queue of their chunks, their sessions, and the step that they share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from torch import Tensor

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, GenerationRequest, MitigationChoice, ScoredToken, whole_answer
from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.decode.answer_writer import AnswerWriter, Sampler, choose_together
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.decode.token_scores import open_scored
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.plan.layout import Layout


@runtime_checkable
class SteppedGenerator(Generator, Protocol):
    """A generator whose answers can be written step by step from outside, several together. The engine is one."""

    @property
    def encoder(self) -> Tokenizer:
        """The tokenizer, which also knows what ends an answer."""
        ...

    def open(
        self, layout: Layout, mitigation: MitigationChoice | None = None, max_tokens: int = 1, salt: str = ""
    ) -> Session:
        """Read a prompt and return the session that continues it."""
        ...


def _nothing() -> None:
    """The default of ``check`` and ``released``."""


class RequestHandle:
    """A request and a queue of its chunks. The model's thread puts chunks, the consumer's thread takes them.

    Args:
        check: Raises if the answer is not request any more.
        released: Called once, when nothing more will be computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        check: Callable[[], None] = _nothing,
        released: Callable[[], None] = _nothing,
    ) -> None:
        self.request = request
        self._check = check
        self._released = released
        self._chunks: SimpleQueue[Chunk | Exception] = SimpleQueue()
        self._cancelled = False
        self._over = False
        self._asked = time.perf_counter()

    @property
    def age(self) -> float:
        """Seconds since it was asked."""
        return time.perf_counter() - self._asked

    def next_chunk(self) -> Chunk:
        """Return the next chunk; wait for it. Raises what the answer failed with."""
        chunk = self._chunks.get()
        if isinstance(chunk, Chunk):
            return chunk
        try:
            raise chunk
        finally:
            del chunk  # its traceback holds this frame

    def cancel(self) -> None:
        """Stop the answer: no chunk is taken any more. Takes no lock: a garbage collector may call it anywhere."""
        self._cancelled = True

    def still_wanted(self) -> bool:
        """Return whether the answer is still wanted; if not, the consumer has been told."""
        if self._cancelled:
            self._end()
            return False
        try:
            self._check()
        except Exception as error:
            self.fail(error)
            return False
        return True

    def put(self, chunk: Chunk) -> None:
        """Put a chunk; the one with the whole answer is the last."""
        if chunk.generation is not None:
            self._end()
        self._chunks.put(chunk)

    def fail(self, error: Exception) -> None:
        """Put an exception, which the consumer gets in place of all further chunks."""
        self._end()
        self._chunks.put(error)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._released()


class RunningRequest:
    """A request whose prompt has been read, between two decode steps. Decodes as ``Engine.resume`` does.

    Args:
        engine: Prefills the prompt, in the constructor.

    Raises:
        RagPosfixError: those of ``Engine.open``.
    """

    def __init__(self, engine: SteppedGenerator, handle: RequestHandle) -> None:
        request = handle.request
        self._waited = handle.age
        self.handle = handle
        prompt: Sequence[ScoredToken] = ()
        if request.prompt_scored:
            self.session, prompt = open_scored(engine.open, request, engine.encoder.token_bytes)
        else:
            self.session = engine.open(request.layout, request.mitigation, request.sampling.max_tokens, request.salt)
        self._writer = AnswerWriter(engine.encoder, self.session, request, prompt)

    @property
    def token(self) -> int:
        """The token that was written last: the next step reads it."""
        return self._writer.last

    @property
    def sampler(self) -> Sampler:
        """Chooses its tokens."""
        return self._writer.sampler

    def write(self) -> bool:
        """Choose the next token and deliver its text; return whether the answer goes on."""
        log_probs = self.session.next_log_probs()
        return self.accept(self.sampler.choose(log_probs), log_probs)

    def accept(self, token: int, log_probs: Tensor) -> bool:
        """Deliver the text of a token that ``sampler`` chose from ``log_probs``; return whether the answer goes on."""
        writer = self._writer
        if (chunk := writer.accept(token, log_probs)).text:
            self.handle.put(chunk)
        if writer.done:
            last = writer.end()
            generation = whole_answer([last])
            timings = {"queue": self._waited, **generation.timings}
            self.handle.put(replace(last, generation=replace(generation, timings=timings)))
        return not writer.done


_log = logging.getLogger(__name__)


def decode_step(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Advance every answer by one token and return those that go on, in order.

    An answer that advances alone fails alone. What fails in the shared pass fails every answer in it: which of
    them were advanced is unknown.
    """
    shared = [one for one in running if one.session.can_share_pass]
    groups = [shared] if shared else []
    groups += [[one] for one in running if one not in shared]
    failed = [one for group in groups if not _advance(group) for one in group]
    return _write([one for one in running if one not in failed])


def _advance(group: Sequence[RunningRequest]) -> bool:
    """Run one step of answers that share it; return whether it went well."""
    try:
        advance_batch([one.session for one in group], [one.token for one in group])
    except Exception as error:
        if len(group) == 1:
            group[0].handle.fail(error)
            return False
        _log.error("a step that %d answers shared failed: %s", len(group), type(error).__name__)
        for one in group:
            one.handle.fail(_shared_failure(error, len(group)))
        return False
    return True


def _write(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Choose one token of each answer, all in one read from the device; return the answers that go on."""
    scored: list[tuple[RunningRequest, Tensor]] = []
    for one in running:
        try:
            scored.append((one, one.session.next_log_probs()))
        except Exception as error:
            one.handle.fail(error)
    try:
        tokens = choose_together([one.sampler for one, _ in scored], [scores for _, scores in scored])
    except Exception as error:
        for one, _ in scored:
            one.handle.fail(error if len(scored) == 1 else _shared_failure(error, len(scored)))
        return []
    return [one for (one, scores), token in zip(scored, tokens, strict=True) if _accept(one, token, scores)]


def _accept(one: RunningRequest, token: int, log_probs: Tensor) -> bool:
    """Deliver one token; return whether the answer goes on."""
    try:
        return one.accept(token, log_probs)
    except Exception as error:
        one.handle.fail(error)
        return False


def _shared_failure(error: Exception, count: int) -> GenerationError:
    """Return an error of its own for each answer: an exception that several threads raise mixes their tracebacks."""
    failure = GenerationError(
        f"a step that {count} answers shared failed with {type(error).__name__}; ask again, and lower max_running if "
        "memory is short"
    )
    failure.__cause__ = error
    return failure.with_traceback(error.__traceback__)
