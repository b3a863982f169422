"""The handle of a request: a queue of its chunks between the model's thread and the consumer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

from torch import Tensor

from rag_posfix.contracts.request import Chunk, GenerationRequest, whole_answer
from rag_posfix.contracts.token_scores import ScoredToken
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.decode.answer_writer import AnswerWriter
from rag_posfix.generation.decode.prompt_scores import open_scored
from rag_posfix.generation.decode.sampling import Sampler


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
