"""Several sessions decoded together: each prompt is prefilled alone, then one forward pass per step serves all.

The answers are those of one session at a time: to the last bit with a batch-invariant model
(``generation/model/batch_invariance.py``). ``score_batch`` pads answers to the longest, which changes the last digits:
where scores are compared, score them in equal batches.
"""

from __future__ import annotations

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

    Sessions share one forward pass, whatever their mitigations; those of models whose layers do not keep all keys
    advance on their own. Any sessions of one model may come together at any step.
    """
    joint = [i for i, session in enumerate(sessions) if session.can_share_pass]
    if len(joint) < 2:
        joint = []
    for i in sorted(set(range(len(sessions))) - set(joint)):
        sessions[i].advance(tokens[i])
    observers = [sessions[i].observers() for i in joint]
    found = _pass([(sessions[i].batches, [tokens[i]]) for i in joint], 1, observers)
    for i, logits, seen in zip(joint, found, observers, strict=True):
        sessions[i].accept(tokens[i], logits[:, -1], seen)


@torch.inference_mode()
def score_batch(sessions: Sequence[Session], answers: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return what each session's ``score`` returns for its answer; the sessions stay where they are.

    Cost: one forward pass over the longest answer.
    """
    joint = [i for i, session in enumerate(sessions) if session.can_share_pass and len(answers[i]) > 1]
    longest = max((len(answers[i]) - 1 for i in joint), default=0)
    # Padding after an answer is hidden from it by causality.
    padded = [[*answers[i][:-1], *[0] * (longest + 1 - len(answers[i]))] for i in joint]
    ahead = [[batch.branch() for batch in sessions[i].batches] for i in joint]
    logits = dict(zip(joint, _pass(list(zip(ahead, padded, strict=True)), longest), strict=True))
    return [
        session.score_from(answer, logits[i][:, : len(answer) - 1]) if i in logits else session.score(answer)
        for i, (session, answer) in enumerate(zip(sessions, answers, strict=True))
    ]


def _pass(
    given: Sequence[tuple[Sequence[SequenceBatch], Sequence[int]]],
    keep: int,
    observers: Sequence[Sequence[Observer | None]] | None = None,
) -> list[Tensor]:
    """Append each session's tokens to all of its rows, in one pass; return the logits of each session, (R, keep, V).

    Args:
        given: The batches of each session, and the tokens to append.
        keep: Number of last tokens whose logits are returned.
        observers: Of each batch of each session.
    """
    if not given:
        return []
    batches = [batch for own, _ in given for batch in own]
    rows = [tokens for own, tokens in given for batch in own for _ in range(batch.n_rows)]
    ids = torch.tensor(rows, device=batches[0].loaded.device)  # one upload for all
    ids_of = list(torch.split(ids, [batch.n_rows for batch in batches]))
    seen = None if observers is None else [observer for own in observers for observer in own]
    found = iter(forward_batches(batches, ids_of, keep, seen))
    return [torch.cat([next(found) for _ in own]) for own, _ in given]


def generate_batch(
    engine: Engine, sessions: Sequence[Session], requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Return the answers of sessions that have read the requests' prompts. One batch, whatever its size."""
    writers = [AnswerWriter(engine.encoder, s, r) for s, r in zip(sessions, requests, strict=True)]
    while True:
        open_answers = [pair for pair in zip(sessions, writers, strict=True) if not pair[1].done]
        scores = [session.next_log_probs() for session, _ in open_answers]
        chosen = choose_together([writer.sampler for _, writer in open_answers], scores)
        for (_, writer), token, log_probs in zip(open_answers, chosen, scores, strict=True):
            writer.accept(token, log_probs)
        going = [(session, writer.last) for session, writer in zip(sessions, writers, strict=True) if not writer.done]
        if not going:
            return [whole_answer([writer.end()]) for writer in writers]
        advance_batch([session for session, _ in going], [token for _, token in going])


def in_batches(items: Iterable[T], session_of: Callable[[T], Session]) -> Iterator[list[T]]:
    """Yield ``items`` in order, in lists whose sessions fit together: few rows and few tokens, at least one item.

    Items are taken as they are needed: an iterator that opens sessions holds one batch of them and one more.
    """
    batch: list[T] = []
    for item in items:
        sessions = [session_of(one) for one in (*batch, item)]
        rows = sum(map(_n_rows, sessions))
        tokens = sum(b.n_rows * b.length for session in sessions for b in session.batches)
        if batch and (rows > MAX_ROWS or tokens > MAX_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _n_rows(session: Session) -> int:
    return sum(batch.n_rows for batch in session.batches)
