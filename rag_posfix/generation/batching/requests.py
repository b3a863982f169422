"""Requests between two decode steps: the queue of their chunks, their sessions, and the step that they share.

Answers of sessions that are decoded together equal those of one session at a time: to the last bit with a
batch-invariant model (``generation/model/batch_invariance.py``). ``score_batch`` pads answers to the longest, which
changes the last digits: where scores are compared, score them in equal batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rag_posfix.contracts.request import Generation, GenerationRequest, whole_answer
from rag_posfix.generation.decode.answer_writer import AnswerWriter, choose_together
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.model.json_grammar import JsonText
from rag_posfix.generation.model.sequence_batch import SequenceBatch, forward_batches
from rag_posfix.patching.forward_context import Observer

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine
import logging
import time
from dataclasses import replace
from queue import SimpleQueue

from rag_posfix.contracts.request import Chunk, ScoredToken
from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.stepped import SteppedGenerator
from rag_posfix.generation.decode.answer_writer import open_scored

T = TypeVar("T")

MAX_ROWS = 16
"""Rows that decode together: a step then still costs little more than one row's, because weights are read once."""

MAX_TOKENS = 8 * 3072
"""Keys of all rows that decode together: bounds the memory of a batch."""


@torch.inference_mode()
def advance_batch(sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """Append a generated token to each session.

    Sessions share one forward pass, whatever their mitigations; sessions of models whose layers do not keep all
    keys advance on their own. Any sessions of one model may come together at any step.
    """
    shared = [i for i, session in enumerate(sessions) if session.can_share_pass]
    if len(shared) < 2:
        shared = []
    for i in sorted(set(range(len(sessions))) - set(shared)):
        sessions[i].advance(tokens[i])
    observers = [sessions[i].observers() for i in shared]
    logits_of = _pass([(sessions[i].batches, [tokens[i]]) for i in shared], 1, observers)
    for i, logits, session_observers in zip(shared, logits_of, observers, strict=True):
        sessions[i].accept(tokens[i], logits[:, -1], session_observers)


@torch.inference_mode()
def score_batch(sessions: Sequence[Session], answers: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return what each session's ``score`` returns for its answer; the sessions stay where they are.

    Cost: one forward pass over the longest answer.
    """
    shared = [i for i, session in enumerate(sessions) if session.can_share_pass and len(answers[i]) > 1]
    longest = max((len(answers[i]) - 1 for i in shared), default=0)
    # Padding after an answer is hidden from it by causality.
    padded = [[*answers[i][:-1], *[0] * (longest + 1 - len(answers[i]))] for i in shared]
    ahead = [[batch.branch() for batch in sessions[i].batches] for i in shared]
    logits = dict(zip(shared, _pass(list(zip(ahead, padded, strict=True)), longest), strict=True))
    return [
        session.score_from(answer, logits[i][:, : len(answer) - 1]) if i in logits else session.score(answer)
        for i, (session, answer) in enumerate(zip(sessions, answers, strict=True))
    ]


def _pass(
    appended: Sequence[tuple[Sequence[SequenceBatch], Sequence[int]]],
    keep: int,
    observers: Sequence[Sequence[Observer | None]] | None = None,
) -> list[Tensor]:
    """Append tokens to all rows of each session's batches, in one pass.

    Returns the logits of the last ``keep`` tokens of each session, (R, keep, V). ``observers`` are of each batch of
    each session.
    """
    if not appended:
        return []
    batches = [batch for session_batches, _ in appended for batch in session_batches]
    rows = [tokens for session_batches, tokens in appended for batch in session_batches for _ in range(batch.n_rows)]
    ids = torch.tensor(rows, device=batches[0].loaded.device)  # one upload for all
    ids_of = list(torch.split(ids, [batch.n_rows for batch in batches]))
    flat = None if observers is None else list(itertools.chain.from_iterable(observers))
    logits = iter(forward_batches(batches, ids_of, keep, flat))
    return [torch.cat([next(logits) for _ in session_batches]) for session_batches, _ in appended]


def generate_batch(
    engine: Engine, sessions: Sequence[Session], requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Return the answers of sessions that have read the requests' prompts. One batch, whatever its size."""
    writers = [AnswerWriter(engine.encoder, s, r) for s, r in zip(sessions, requests, strict=True)]
    while True:
        open_answers = [pair for pair in zip(sessions, writers, strict=True) if not pair[1].done]
        scores = [writer.next_log_probs() for _, writer in open_answers]
        chosen = choose_together([writer.sampler for _, writer in open_answers], scores)
        for (_, writer), token, log_probs in zip(open_answers, chosen, scores, strict=True):
            writer.accept(token, log_probs)
        continuing = [
            (session, writer.last) for session, writer in zip(sessions, writers, strict=True) if not writer.done
        ]
        if not continuing:
            return [whole_answer([writer.end()]) for writer in writers]
        advance_batch([session for session, _ in continuing], [token for _, token in continuing])


def in_batches(items: Iterable[T], session_of: Callable[[T], Session]) -> Iterator[list[T]]:
    """Yield ``items`` in order, in lists whose sessions fit together: few rows and few tokens, at least one item.

    Items are taken as they are needed: an iterator that opens sessions holds one batch of them and one more.
    """
    batch: list[T] = []
    for item in items:
        batches = [b for member in (*batch, item) for b in session_of(member).batches]
        rows = sum(b.n_rows for b in batches)
        tokens = sum(b.n_rows * b.length for b in batches)
        if batch and (rows > MAX_ROWS or tokens > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class RequestHandle:
    """A request and a queue of its chunks. The model's thread puts chunks, the consumer's thread takes them.

    Args:
        check: Raises if the request was cancelled or timed out.
        released: Called once, when nothing more will be computed.

    Attributes:
        json_text: The JSON text that the answer is to be, if its schema is compiled already.
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
        self.json_text: JsonText | None = None
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
            self.session = engine.open(
                request.layout, request.mitigation, request.sampling.max_tokens, request.salt, request.kv_position
            )
        self.writer = AnswerWriter(engine.encoder, self.session, request, prompt, handle.json_text)

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
