"""Requests between two decode steps: the queue of their chunks, their sessions, and the step that they share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

from torch import Tensor

from rag_posfix.contracts.request import Chunk, GenerationRequest, ScoredToken, whole_answer
from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.session_batch import advance_batch
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.decode.answer_writer import AnswerWriter, choose_together
from rag_posfix.generation.decode.token_scores import open_scored


class RequestHandle:
    """A request and a queue of its chunks. The model's thread puts chunks, the consumer's thread takes them.

    Args:
        check: Raises if the request was cancelled or timed out.
        released: Called once, when nothing more will be computed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        check: Callable[[], None] = lambda: None,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.request = request
        self._check = check
        self._released = released
        self._chunks: SimpleQueue[Chunk | Exception] = SimpleQueue()
        self._cancelled = False
        self._over = False
        self.created = time.perf_counter()

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

    def is_wanted(self) -> bool:
        """Return whether the answer is still wanted; if not, the stream has ended with the reason."""
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

    The constructor prefills the prompt; errors as those of ``Engine.open``.
    """

    def __init__(self, engine: SteppedGenerator, handle: RequestHandle) -> None:
        request = handle.request
        self._queue_seconds = time.perf_counter() - handle.created
        self.handle = handle
        prompt: Sequence[ScoredToken] = ()
        if request.prompt_scored:
            self.session, prompt = open_scored(engine.open, request, engine.encoder.token_bytes)
        else:
            self.session = engine.open(request.layout, request.mitigation, request.sampling.max_tokens, request.salt)
        self.writer = AnswerWriter(engine.encoder, self.session, request, prompt)

    def accept(self, token: int, log_probs: Tensor) -> bool:
        """Deliver the text of a token that was chosen from ``log_probs``; return whether the answer goes on."""
        writer = self.writer
        if (chunk := writer.accept(token, log_probs)).text:
            self.handle.put(chunk)
        if writer.done:
            last = writer.end()
            generation = whole_answer([last])
            timings = {"queue": self._queue_seconds, **generation.timings}
            self.handle.put(replace(last, generation=replace(generation, timings=timings)))
        return not writer.done


_log = logging.getLogger(__name__)


def decode_step(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Advance every answer by one token and return those that go on, in order.

    An answer that advances alone fails alone. What fails in the shared pass fails every answer in it: which of
    them were advanced is unknown.
    """
    shared = [request for request in running if request.session.can_share_pass]
    groups = [shared] if shared else []
    groups += [[request] for request in running if request not in shared]
    advanced = [request for group in groups if _advance(group) for request in group]
    return write_tokens([request for request in running if request in advanced])


def _advance(group: Sequence[RunningRequest]) -> bool:
    """Run one step of answers that share it; return whether it went well."""
    try:
        advance_batch([request.session for request in group], [request.writer.last for request in group])
    except Exception as error:
        _fail(group, error)
        return False
    return True


def write_tokens(running: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Choose one token of each answer, all in one read from the device; return the answers that go on."""
    scored: list[tuple[RunningRequest, Tensor]] = []
    for request in running:
        try:
            scored.append((request, request.writer.next_log_probs()))
        except Exception as error:
            request.handle.fail(error)
    try:
        samplers = [request.writer.sampler for request, _ in scored]
        tokens = choose_together(samplers, [log_probs for _, log_probs in scored])
    except Exception as error:
        _fail([request for request, _ in scored], error)
        return []
    continuing = []
    for (request, log_probs), token in zip(scored, tokens, strict=True):
        try:
            if request.accept(token, log_probs):
                continuing.append(request)
        except Exception as error:
            request.handle.fail(error)
    return continuing


def _fail(group: Sequence[RunningRequest], error: Exception) -> None:
    """End the answers of a step that failed.

    Several get an error of their own each: an exception that several threads raise mixes their tracebacks.
    """
    if len(group) == 1:
        group[0].handle.fail(error)
        return
    _log.error("a step that %d answers shared failed: %s", len(group), type(error).__name__)
    for request in group:
        failure = GenerationError(
            f"a step that {len(group)} answers shared failed with {type(error).__name__}; ask again, and lower "
            "max_running if memory is short"
        )
        failure.__cause__ = error
        request.handle.fail(failure.with_traceback(error.__traceback__))
