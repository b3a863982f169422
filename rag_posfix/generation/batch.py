"""Several prompts answered together: each is read alone, then one forward pass per step serves all of them.

The answers are those of one by one. In bfloat16 the last digits may differ with the company that an answer keeps, as
they do with any batch: where answers are compared, give each the same company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rag_posfix.attention.shape import Capability
from rag_posfix.generation.forward import Rows, new_cache
from rag_posfix.generation.request import Generation, GenerationRequest
from rag_posfix.generation.session import Session
from rag_posfix.generation.writer import Writer

if TYPE_CHECKING:
    from rag_posfix.generation.engine import Engine

__all__ = ["Batch", "generate_together", "in_batches", "write_together"]

T = TypeVar("T")

MOST_ROWS = 16
"""Rows that decode together: a step then still costs little more than one row's, because weights are read once."""

MOST_TOKENS = 8 * 1536
"""Keys that decode together, padding included: bounds the memory of a batch."""


class Batch:
    """Sessions that advance together. From the first step on they must not be advanced in any other way.

    Rows that decode plainly are merged into one batch, the shorter ones padded in front. Other sessions advance on
    their own.

    Args:
        sessions: Sessions of one model.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = list(sessions)
        joint = [i for i, session in enumerate(self._sessions) if all(map(_plain, session.groups))]
        several = sum(len(self._sessions[i].groups) for i in joint) > 1
        self._joint = joint if several else []
        self._rows: Rows | None = None

    @torch.inference_mode()
    def score(self, answers: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return what each session's ``score`` returns for its answer; the sessions stay where they are.

        Cost: a copy of the caches and one forward pass over the longest answer. Call it before the first step.
        """
        joint = [i for i in self._joint if len(answers[i]) > 1]
        longest = max((len(answers[i]) - 1 for i in joint), default=0)
        logits: dict[int, Tensor] = {}
        if joint:
            rows = _merged([group for i in joint for group in self._sessions[i].groups])
            # Padding after an answer is hidden from it by the causal mask.
            padded = [[*answers[i][:-1], *[0] * (longest + 1 - len(answers[i]))] for i in joint]
            counts = [_n_rows(self._sessions[i]) for i in joint]
            ids = torch.tensor(padded, device=rows.positions.device)
            ids = ids.repeat_interleave(torch.tensor(counts, device=ids.device), dim=0)
            found = torch.split(rows.forward(ids, rows.next_positions(longest), keep=longest), counts)
            logits = {i: own[:, : len(answers[i]) - 1] for i, own in zip(joint, found, strict=True)}
        return [
            session.score_from(answer, logits[i]) if i in logits else session.score(answer)
            for i, (session, answer) in enumerate(zip(self._sessions, answers, strict=True))
        ]

    @torch.inference_mode()
    def advance(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each session; None ends a session for good."""
        for i, (session, token) in enumerate(zip(self._sessions, tokens, strict=True)):
            if token is not None and i not in self._joint:
                session.advance(token)
        self._drop([i for i in self._joint if tokens[i] is None])
        if not self._joint:
            return
        if self._rows is None:
            self._rows = _merged([group for i in self._joint for group in self._sessions[i].groups])
        counts = [_n_rows(self._sessions[i]) for i in self._joint]
        ids = torch.tensor([[tokens[i]] for i in self._joint], device=self._rows.positions.device)
        ids = ids.repeat_interleave(torch.tensor(counts, device=ids.device), dim=0)
        found = torch.split(self._rows.forward(ids, self._rows.next_positions(), keep=1)[:, -1], counts)
        for i, logits in zip(self._joint, found, strict=True):
            token = tokens[i]
            if token is not None:
                self._sessions[i].accept(token, logits)

    def _drop(self, ended: Sequence[int]) -> None:
        """Take the rows of sessions that have ended out of the batch."""
        if ended and self._rows is not None:
            owners = [i for i in self._joint for _ in range(_n_rows(self._sessions[i]))]
            kept = [row for row, owner in enumerate(owners) if owner not in ended]
            self._rows = self._rows.select(kept) if kept else None
        self._joint = [i for i in self._joint if i not in ended]


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
    batch = Batch(sessions)
    writers = [Writer(engine.encoder, s, r) for s, r in zip(sessions, requests, strict=True)]
    while True:
        for session, writer in zip(sessions, writers, strict=True):
            if not writer.done:
                writer.write(session.next_log_probs())
        if all(writer.done for writer in writers):
            return [writer.end()[1] for writer in writers]
        batch.advance([None if writer.done else writer.last for writer in writers])


def in_batches(items: Iterable[T], session_of: Callable[[T], Session]) -> Iterator[list[T]]:
    """Yield ``items`` in order, in lists whose sessions fit together: few rows and few tokens, at least one item.

    Items are taken as they are needed: an iterator that opens sessions holds one batch of them and one more.
    """
    batch: list[T] = []
    for item in items:
        sessions = [session_of(one) for one in (*batch, item)]
        rows = sum(map(_n_rows, sessions))
        tokens = rows * max(group.length for session in sessions for group in session.groups)
        if batch and (rows > MOST_ROWS or tokens > MOST_TOKENS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _n_rows(session: Session) -> int:
    return sum(group.n_rows for group in session.groups)


def _plain(rows: Rows) -> bool:
    """Return whether rows decode as the model was trained to, from positions and padding alone."""
    full = Capability.FULL_CACHE in rows.loaded.spec.shape.capabilities
    return full and rows.plain


def _merged(groups: Sequence[Rows]) -> Rows:
    """Return one batch of the rows of all groups, padded in front. The groups stay as they are."""
    longest = max(group.length for group in groups)
    cache = new_cache(groups[0].loaded)
    for number, layers in enumerate(zip(*(group.cache.layers for group in groups), strict=True)):
        keys = torch.cat([_pad_in_front(layer.keys, longest) for layer in layers])
        values = torch.cat([_pad_in_front(layer.values, longest) for layer in layers])
        cache.update(keys, values, number)
    padding = torch.cat([_front(_real(group), longest) for group in groups])
    return Rows(
        loaded=groups[0].loaded,
        cache=cache,
        positions=torch.cat([_front(group.positions, longest) for group in groups]),
        padding=None if bool(padding.all()) else padding,
        length=longest,
    )


def _real(rows: Rows) -> Tensor:
    """Return which tokens are no padding. Shape (R, T), bool."""
    return torch.ones_like(rows.positions, dtype=torch.bool) if rows.padding is None else rows.padding


def _pad_in_front(states: Tensor, length: int) -> Tensor:
    """Shapes: states: (R, Hkv, T, D). returns: (R, Hkv, length, D)."""
    return torch.nn.functional.pad(states, (0, 0, length - states.shape[2], 0))


def _front(values: Tensor, length: int) -> Tensor:
    """Shapes: values: (R, T). returns: (R, length), zeros or False in front."""
    return torch.nn.functional.pad(values, (length - values.shape[1], 0))
