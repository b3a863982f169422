"""Several prompts answered together: each is read alone, then one forward pass per step serves all of them.

The answers are those of one by one. In bfloat16 the last digits may differ with the company that an answer keeps, as
they do with any batch: where answers are compared, give each the same company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rag_posfix.contracts.request import Generation, GenerationRequest
from rag_posfix.generation.decode.session import Session
from rag_posfix.generation.decode.writer import Writer
from rag_posfix.generation.model.sequence_batch import Rows, forward_together
from rag_posfix.patching.call import Observer

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine

__all__ = ["advance_together", "generate_together", "in_batches", "score_together", "write_together"]

T = TypeVar("T")

MOST_ROWS = 16
"""Rows that decode together: a step then still costs little more than one row's, because weights are read once."""

MOST_TOKENS = 8 * 3072
"""Keys of all rows that decode together: bounds the memory of a batch."""


@torch.inference_mode()
def advance_together(sessions: Sequence[Session], tokens: Sequence[int]) -> None:
    """Append a generated token to each session.

    Sessions share one forward pass, whatever their mitigations; those of models whose layers do not keep all keys
    advance on their own. Any sessions of one model may come together at any step.
    """
    joint = [i for i, session in enumerate(sessions) if session.joins]
    if len(joint) < 2:
        joint = []
    for i in sorted(set(range(len(sessions))) - set(joint)):
        sessions[i].advance(tokens[i])
    observers = [sessions[i].observers() for i in joint]
    found = _pass([(sessions[i].groups, [tokens[i]]) for i in joint], 1, observers)
    for i, logits, seen in zip(joint, found, observers, strict=True):
        sessions[i].accept(tokens[i], logits[:, -1], seen)


@torch.inference_mode()
def score_together(sessions: Sequence[Session], answers: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return what each session's ``score`` returns for its answer; the sessions stay where they are.

    Cost: one forward pass over the longest answer.
    """
    joint = [i for i, session in enumerate(sessions) if session.joins and len(answers[i]) > 1]
    longest = max((len(answers[i]) - 1 for i in joint), default=0)
    # Padding after an answer is hidden from it by causality.
    padded = [[*answers[i][:-1], *[0] * (longest + 1 - len(answers[i]))] for i in joint]
    ahead = [[rows.fork() for rows in sessions[i].groups] for i in joint]
    logits = dict(zip(joint, _pass(list(zip(ahead, padded, strict=True)), longest), strict=True))
    return [
        session.score_from(answer, logits[i][:, : len(answer) - 1]) if i in logits else session.score(answer)
        for i, (session, answer) in enumerate(zip(sessions, answers, strict=True))
    ]


def _pass(
    given: Sequence[tuple[Sequence[Rows], Sequence[int]]],
    keep: int,
    observers: Sequence[Sequence[Observer | None]] | None = None,
) -> list[Tensor]:
    """Read each one's tokens in all of its rows, in one forward pass; return the logits of each, (R, keep, V)."""
    if not given:
        return []
    groups, ids = [], []
    for own, tokens in given:
        for rows in own:
            groups.append(rows)
            ids.append(torch.tensor([tokens] * rows.n_rows, device=rows.positions.device))
    seen = None if observers is None else [observer for own in observers for observer in own]
    found = iter(forward_together(groups, ids, keep, seen))
    return [torch.cat([next(found) for _ in own]) for own, _ in given]


def generate_together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Return the whole answer to each request. Errors as those of ``Engine.open``.

    Prompts are read one by one and answered in batches, so any number may be given. ``timings["decode"]`` of an
    answer is the time until it ended, its neighbours' work included.

    Args:
        engine: The model.
        requests: Prompts, each with its own mitigation and sampling.
    """
    opened = ((engine.open(r.layout, r.mitigation, r.sampling.max_tokens), r) for r in requests)
    generations: list[Generation] = []
    for batch in in_batches(opened, lambda pair: pair[0]):
        generations += write_together(engine, [session for session, _ in batch], [request for _, request in batch])
    return generations


def write_together(
    engine: Engine, sessions: Sequence[Session], requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Return the answers of sessions that have read the requests' prompts. One batch, whatever its size."""
    writers = [Writer(engine.encoder, s, r) for s, r in zip(sessions, requests, strict=True)]
    while True:
        for session, writer in zip(sessions, writers, strict=True):
            if not writer.done:
                writer.write(session.next_log_probs())
        going = [(session, writer.last) for session, writer in zip(sessions, writers, strict=True) if not writer.done]
        if not going:
            return [writer.end()[1] for writer in writers]
        advance_together([session for session, _ in going], [token for _, token in going])


def in_batches(items: Iterable[T], session_of: Callable[[T], Session]) -> Iterator[list[T]]:
    """Yield ``items`` in order, in lists whose sessions fit together: few rows and few tokens, at least one item.

    Items are taken as they are needed: an iterator that opens sessions holds one batch of them and one more.
    """
    batch: list[T] = []
    for item in items:
        sessions = [session_of(one) for one in (*batch, item)]
        rows = sum(map(_n_rows, sessions))
        tokens = sum(group.n_rows * group.length for session in sessions for group in session.groups)
        if batch and (rows > MOST_ROWS or tokens > MOST_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _n_rows(session: Session) -> int:
    return sum(group.n_rows for group in session.groups)
