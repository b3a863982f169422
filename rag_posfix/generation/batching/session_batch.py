"""Several sessions decoded together: each prompt is prefilled alone, then one forward pass per step serves all.

The answers equal those of one session at a time: to the last bit with a batch-invariant model
(``generation/model/batch_invariance.py``). ``score_batch`` pads answers to the longest, which changes the last digits:
where scores are compared, score them in equal batches.
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
from rag_posfix.generation.model.sequence_batch import SequenceBatch, forward_batches
from rag_posfix.patching.forward_context import Observer

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine

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
