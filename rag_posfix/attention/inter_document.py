"""Attention between documents, each arranging the others by how much they matter to it: no T x T tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rag_posfix.attention.attend import Attend, AttendInput, Rotated
from rag_posfix.attention.blockwise import attend_with_lse, merge
from rag_posfix.attention.importance import distances, document_importance, shares, token_importance
from rag_posfix.attention.rope import Paired
from rag_posfix.attention.spans import Layout

__all__ = ["ByImportance"]

BLOCK = 64
"""Tokens after the documents that are computed at a time: each arranges the documents for itself, in each head."""


@dataclass(frozen=True, eq=False)
class ByImportance(Attend):
    """Documents see each other whole; to each query the documents that matter most to it stand nearest.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100

    Everything is computed in relative form. A key is rotated to where it stands inside of its segment, once; a
    segment as a whole is then moved by one more rotation, the same for all of its tokens.

    Attributes:
        prefix: Tokens before the documents, P.
        lengths: (N,) tokens of each document, n_j.
        segments: (P + S,) the segment of each token: 0 prefix, 1..N documents.
        offsets: (P + S,) where each token stands in its segment.
        share: (S, N), 1 / n_j where a token belongs to document j.
    """

    rotated: ClassVar[Rotated] = Rotated.NEITHER

    prefix: int
    lengths: Tensor
    segments: Tensor
    offsets: Tensor
    share: Tensor

    @classmethod
    def over(cls, layout: Layout) -> ByImportance:
        """Return the attention over a prompt's passages."""
        sizes = [len(layout.prefix), *(len(span) for span in layout.passages)]
        lengths = torch.tensor(sizes[1:])
        return cls(
            prefix=sizes[0],
            lengths=lengths,
            segments=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
            offsets=torch.cat([torch.arange(size) for size in sizes]),
            share=shares(lengths),
        )

    def visible(self, n_tokens: int) -> Tensor:
        """Return which token sees which: causal, and documents see each other."""
        index = torch.arange(n_tokens)
        inside = (index >= self.prefix) & (index < len(self.segments))
        segment = torch.nn.functional.pad(self.segments, (0, n_tokens - len(self.segments)))
        across = inside[:, None] & inside[None] & (segment[:, None] != segment[None])
        return (index[None] <= index[:, None]) | across

    def __call__(self, given: AttendInput) -> tuple[Tensor, Tensor | None]:
        """Return the output and the newest query's attention."""
        run = _Pass(self, given)
        end = len(self.segments)
        outs = run.prompt() if given.start == 0 else []
        newest = None
        for first in range(max(given.start, end), given.key.shape[2], BLOCK):
            out, newest = run.after(first, min(first + BLOCK, given.key.shape[2]))
            outs.append(out)
        return torch.cat(outs, dim=2), newest


class _Pass:
    """One layer's attention in one forward pass.

    ``home``: rotated to where a token stands inside of its own segment.
    """

    def __init__(self, plan: ByImportance, given: AttendInput) -> None:
        self.given = given
        self.prefix, self.end = plan.prefix, len(plan.segments)
        device = given.key.device
        self.lengths, self.share, self.segments = (
            part.to(device) for part in (plan.lengths, plan.share, plan.segments)
        )
        n_key = given.key.shape[2]
        offsets = torch.cat((plan.offsets.to(device), torch.arange(n_key - self.end, device=device)))
        table = given.rotate.turns(torch.arange(int(offsets.max()) + 1, device=device).float()[None])
        self.home_turns = table[:, :, offsets]  # (1, 1 | Hkv, Tk, pairs)
        self.n_pairs = table.shape[-1]
        self.query, self.key = Paired.of(given.query, self.n_pairs), Paired.of(given.key, self.n_pairs)
        self.plain_key = self.key.tokens(slice(self.prefix, self.end)).vectors()[0]  # (Hkv, S, D)
        self.home_key = self.key.turned(self.home_turns)
        self.groups = given.query.shape[1] // given.key.shape[1]
        edges = [self.prefix, *(self.prefix + plan.lengths.cumsum(0)).tolist()]
        self.spans = [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]

    # ---------------------------------------------------------------- prefix and documents

    def prompt(self) -> list[Tensor]:
        """Return the outputs of the prefix and of each document, (1, Hq, n, D) each."""
        dtype = self.given.query.dtype
        turns = self.home_turns[:, :, : self.end]
        if turns.shape[1] > 1:
            turns = turns.repeat_interleave(self.groups, dim=1)
        home_query = self.query.tokens(slice(0, self.end)).turned(turns).vectors(dtype)
        home_key = self.home_key.vectors(dtype)
        outs = []
        for span, moved in [(slice(0, self.prefix), None), *self._moved_keys()]:
            if span.stop > span.start:
                query, key, value = (part[:, :, span] for part in (home_query, home_key, self.given.value))
                parts = [attend_with_lse(query, key, value, self.given.scaling, causal=True)]
                if moved is not None:
                    parts.append(self._per_head(query, *moved))
                outs.append(merge(parts)[0])
        return outs

    def _per_head(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention where each query head has keys of its own, but groups share values.

        Groups go as the batch, over which values are repeated without a copy.

        Shapes:
            query: (1, Hq, n, D). key: (1, Hkv, G, Tk, D). value: (1, Hkv, Tk, D).
        """
        query = query.unflatten(1, (-1, self.groups))[0].transpose(0, 1)  # (G, Hkv, n, D)
        value = value.expand(self.groups, -1, -1, -1)
        out, lse = attend_with_lse(query, key[0].transpose(0, 1), value, self.given.scaling)
        return out.transpose(0, 1).flatten(0, 1)[None], lse.transpose(0, 1).flatten(0, 1)[None]

    def _moved_keys(self):  # type: ignore
        """Yield each document with the keys and values of the prefix and of the other documents.

        Keys stand where the document's queries find them, counted from the document's own beginning.
        """
        importance = self._between_documents()  # (N, Hq, N)
        before = -distances(importance, self.lengths)  # (N, Hq, N)
        start = -(self.end - self.lengths).float()  # (N,) where the prefix begins
        at = torch.cat((start[:, None, None].expand(-1, before.shape[1], 1), before), dim=-1)  # (N, Hq, 1 + N)
        turns = self.given.rotate.turns(at.transpose(0, 1).flatten(1)[None])  # (1, Hq, N (1 + N), pairs)
        turns = (turns / turns.abs()).unflatten(2, (len(at), -1))[0].transpose(0, 1)  # (N, Hq, 1 + N, pairs)
        home = self.home_key.tokens(slice(0, self.end))
        for own, span in enumerate(self.spans):
            others = Paired(_without(home.pairs, span), _without(home.rest, span)).grouped(self.groups)
            move = turns[own][:, _without(self.segments[:, None], span)[:, 0]]  # (Hq, Tk - n, pairs)
            key = others.turned(move.unflatten(0, (-1, self.groups)))  # (1, Hkv, G, Tk - n, ...)
            yield (
                span,
                (
                    key.vectors(self.given.query.dtype),
                    _without(self.given.value[:, :, : self.end], span),
                ),
            )

    def _between_documents(self) -> Tensor:
        """Return how much each document matters to each, (N, Hq, N); -inf for itself."""
        n_documents, n_heads = len(self.lengths), self.given.query.shape[1]
        found = self.plain_key.new_zeros(n_documents, n_heads, n_documents)
        for own, span in enumerate(self.spans):
            if n_documents > 2:  # of two, the other one is the nearest whatever it says
                query = self.query.tokens(span).vectors()[0]
                there = slice(span.start - self.prefix, span.stop - self.prefix)
                found[own] = document_importance(query, self.plain_key, self.share, there, self.given.scaling)
            found[own, :, own] = float("-inf")
        return found

    # ---------------------------------------------------------------- what comes after the documents

    def after(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the output (1, Hq, m, D) of tokens ``first`` to ``last`` and the last one's attention (1, Tk)."""
        given = self.given
        n_heads, n_tokens = given.query.shape[1], last - first
        query = self.query.tokens(slice(first - given.start, last - given.start))
        rows = query.vectors()[0].reshape(given.key.shape[1], -1, given.query.shape[-1])  # (Hkv, G m, D)
        importance = token_importance(rows, self.plain_key, self.share, given.scaling)
        begin = self.end - distances(importance, self.lengths).reshape(n_heads, n_tokens, -1)
        begin = torch.nn.functional.pad(begin, (1, 0))  # the prefix begins at 0
        begin = torch.nn.functional.pad(begin, (0, 1), value=float(self.end))  # (Hq, m, N + 2)
        index = torch.arange(first, last, device=begin.device)
        at = (index[:, None] - begin).permute(0, 2, 1)  # (Hq, N + 2, m)
        turns = given.rotate.turns(at.flatten(1)[None])[0].unflatten(1, (-1, n_tokens)).transpose(0, 1)
        moved = query.turned(turns).vectors()  # (N + 2, Hq, m, D)
        moved = moved.reshape(moved.shape[0], *rows.shape)
        home = self.home_key.vectors()[0, :, :last]  # (Hkv, last, D)
        spans = [slice(0, self.prefix), *self.spans, slice(self.end, last)]
        scores = torch.cat([q @ home[:, span].transpose(1, 2) for q, span in zip(moved, spans, strict=True)], dim=-1)
        scores = (scores * given.scaling).view(n_heads, n_tokens, -1)
        if n_tokens > 1:
            scores.masked_fill_(torch.arange(last, device=index.device) > index[:, None], float("-inf"))
        weights = scores.softmax(dim=-1)
        out = weights.view(*rows.shape[:2], -1) @ given.value[0, :, :last].float()
        newest = weights[:, -1].mean(dim=0)[None]
        return out.view(1, n_heads, n_tokens, -1).to(given.query.dtype), newest


def _without(states: Tensor, span: slice) -> Tensor:
    return torch.cat((states[..., : span.start, :], states[..., span.stop :, :]), dim=-2)
