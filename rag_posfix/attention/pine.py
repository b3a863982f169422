"""PINE: attention between documents that orders them by importance for each query; no T x T tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import attend_with_lse
from rag_posfix.attention.causal import attend_causal_each, tiles
from rag_posfix.attention.rope import ComplexPairs
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Rotated


def shares(lengths: Tensor) -> Tensor:
    """Return 1 / n_j where a token belongs to document j and 0 elsewhere, (sum of n_j, N) float32.

    Shapes:
        lengths: (N,).
    """
    of_token = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return torch.nn.functional.one_hot(of_token, len(lengths)).float() / lengths.clamp(min=1)


def token_importance(query: Tensor, key: Tensor, share: Tensor, scaling: float) -> Tensor:
    """Return how much each document matters to each query token: its mean attention without positions.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: s(n) = softmax_n(q^T k_n scaling) over the tokens of all documents; Imp(j) = sum_{n in j} s(n) / n_j.

    Shapes:
        query: (H, R, D) and key: (H, S, D), unrotated float32. share: (S, N), see ``shares``. returns: (H, R, N).
    """
    return torch.matmul(query * scaling, key.transpose(1, 2)).softmax(dim=-1) @ share


def document_importance(query: Tensor, key: Tensor, share: Tensor, scaling: float) -> Tensor:
    """Return how much other documents matter to one document, in each head.

    Source: as ``token_importance``.
    Formula: s(m, n) = softmax_n(q_m^T k_n scaling) over the tokens n of the other documents;
        Imp(j) = sum_m sum_{n in j} s(m, n) / n_j over the tokens m of the one.

    Scores have the dtype of ``query``. In bfloat16 that moves importance by a few times what rounding queries and keys
    moved it. Documents are summed in float32: they seldom tie.

    Cost: ``causal.TILE_SCORES`` scores at a time.

    Shapes:
        query: (Hkv, G, n, D), the document's tokens, and key: (Hkv, S, D), the other documents', both unrotated.
        share: (S, N). returns: (Hkv, G, N) float32.
    """
    n_key_heads, groups, n_query, _ = query.shape
    mass = query.new_zeros((n_key_heads, groups, key.shape[1]), dtype=torch.float32)  # what each token gets from all m
    unused = query.new_zeros(1)
    for heads, rows in tiles(n_key_heads, groups, n_query, key.shape[1]):
        tile = query[heads, :, rows].flatten(1, 2)  # (h, G rows, D)
        scores = torch.baddbmm(unused, tile, key[heads].transpose(1, 2), beta=0, alpha=scaling)
        weights = scores.softmax(dim=-1).view(-1, rows.stop - rows.start, key.shape[1])  # (h G, rows, S)
        summed = torch.bmm(weights.new_ones(len(weights), 1, weights.shape[1]), weights)
        mass[heads].add_(summed.view(-1, groups, key.shape[1]))
    return mass @ share


def distances(importance: Tensor, lengths: Tensor) -> Tensor:
    """Return how far before the end of the documents each begins when the most important one is last.

    Formula: distance(j) = n_j + sum of the lengths of all documents more important than j. Of two that are equally
        important the one with the lower index counts as more important.

    Shapes:
        importance: (..., N). lengths: (N,). returns: (..., N) float32.
    """
    order = importance.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(importance).scatter(-1, order, lengths.float()[order].cumsum(dim=-1))


ROWS = 64
"""Tokens after the documents that are computed at a time: each has arrangements of its own."""


@dataclass(frozen=True, eq=False)
class ImportanceOrderedAttention(AttentionOverride):
    """Documents see each other in full; for each query the documents that matter most to it are nearest.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100

    Everything is computed in relative form. A key is rotated once, to its position inside of its own segment
    (prefix, document, or what comes after the documents); moving a whole segment takes one more rotation, the same
    for all of its tokens.

    Attributes:
        spans: Positions of prefix and documents in the prompt.
        lengths: (N,) tokens of each document, n_j.
        segments: (P + S,) the segment of each token: 0 prefix, 1..N documents.
        offsets: (P + S,) position of each token inside of its segment.
        share: (S, N), 1 / n_j where a token belongs to document j.
    """

    rotated: ClassVar[Rotated] = Rotated.NEITHER

    spans: tuple[slice, ...]
    lengths: Tensor
    segments: Tensor
    offsets: Tensor
    share: Tensor

    @classmethod
    def over(cls, layout: Layout) -> ImportanceOrderedAttention:
        """Return the attention over a prompt's passages."""
        spans = (layout.prefix, *layout.passages)
        lengths = torch.tensor([len(span) for span in layout.passages])
        return cls(
            spans=tuple(span.slice for span in spans),
            lengths=lengths,
            segments=torch.repeat_interleave(torch.tensor([len(span) for span in spans])),
            offsets=torch.cat([torch.arange(len(span)) for span in spans]),
            share=shares(lengths),
        )

    def on(self, device: torch.device) -> ImportanceOrderedAttention:
        """Return the same with its tensors on a device."""
        return replace(
            self,
            lengths=self.lengths.to(device),
            segments=self.segments.to(device),
            offsets=self.offsets.to(device),
            share=self.share.to(device),
        )

    def visible(self, n_tokens: int) -> Tensor:
        """Return which token sees which: causal, and documents see each other."""
        index = torch.arange(n_tokens)
        seen = index[None] <= index[:, None]
        for i, rows in enumerate(self.spans[1:]):
            for j, columns in enumerate(self.spans[1:]):
                if i != j:
                    seen[rows, columns] = True
        return seen

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output and the last query's attention."""
        attention_pass, end, n_key = _Pass(self, inputs), len(self.offsets), inputs.key.shape[2]
        outs = [attention_pass.read_prefix(), attention_pass.read_documents()] if inputs.start == 0 else []
        last_attention = None
        for first in range(max(inputs.start, end), n_key, ROWS):
            out, last_attention = attention_pass.read_after(first, min(first + ROWS, n_key))
            outs.append(out)
        return torch.cat([out.to(inputs.query.dtype) for out in outs], dim=1)[None], last_attention


def repeat_twice(states: Tensor, dim: int = -2) -> Tensor:
    """Repeat the tokens: all documents but one are then one slice, in cyclic order."""
    return torch.cat((states, states), dim=dim)


class _Pass:
    """One layer's attention in one forward pass. The batch axis is left out throughout.

    ``relative_...``: rotated to the position of the token in its segment. ``grouped``: (Hkv, G, ...) instead of
    (Hq, ...), so that the G query heads of a key head broadcast over it.
    """

    def __init__(self, plan: ImportanceOrderedAttention, inputs: AttentionInput) -> None:
        device, n_key = inputs.key.device, inputs.key.shape[2]
        self.inputs, self.spans, self.end = inputs, plan.spans, len(plan.offsets)
        self.lengths, self.share, self.segments = plan.lengths, plan.share, plan.segments
        self.groups = inputs.query.shape[1] // inputs.key.shape[1]
        self.documents = slice(plan.spans[0].stop, self.end)
        offsets = torch.cat((plan.offsets, torch.arange(n_key - self.end, device=device)))
        longest = max(n_key - self.end, *(span.stop - span.start for span in plan.spans))
        table = inputs.rotate.phases(torch.arange(longest, device=device).float()[None])[0]
        self.relative_phases = table[:, offsets]  # (1 | Hkv, Tk, pairs)
        self.query = ComplexPairs.of(inputs.query[0], table.shape[-1])  # (Hq, Tq, D)
        key = ComplexPairs.of(inputs.key[0], table.shape[-1])
        self.plain_key = key.tokens(self.documents).vectors()  # (Hkv, S, D)
        self.relative_key = key.rotated(self.relative_phases)

    def read_prefix(self) -> Tensor:
        """Return the output of the prefix, (Hq, P, D): causal, at its positions."""
        span, dtype = self.spans[0], self.inputs.query.dtype
        if span.start == span.stop:
            return self.inputs.query[0, :, :0]
        query = self._relative_query().tokens(span).vectors(dtype)[None]
        key = self.relative_key.tokens(span).vectors(dtype)[None]
        return attend_with_lse(query, key, self.inputs.value[:, :, span], self.inputs.scaling, causal=True)[0][0]

    def read_documents(self) -> Tensor:
        """Return the output of the documents, (Hq, S, D).

        Queries keep their own position; all other segments are moved to their positions relative to the document's
        beginning.
        """
        inputs, phases, query, dtype = self.inputs, self._moves(), self._relative_query(), self.inputs.query.dtype
        segment_relative = self.relative_key.tokens(slice(0, self.end))
        pairs, unrotated = repeat_twice(segment_relative.pairs), repeat_twice(segment_relative.unrotated)
        doubled = ComplexPairs(pairs, unrotated).grouped(1)  # (Hkv, 1, 2 (P + S), ...)
        segments = repeat_twice(self.segments, 0)
        # Moved keys differ between the heads of a group, and the kernels need as many heads of values.
        value = repeat_twice(inputs.value[:, :, : self.end].repeat_interleave(self.groups, dim=1))
        buffer = phases.new_empty(*phases.shape[1:3], self.end, phases.shape[-1])
        queries = query.vectors(dtype)[None]

        def document_segments() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for span, moves in zip(self.spans[1:], phases, strict=True):
                seen = slice(span.stop, self.end + span.stop)  # those after, the prefix, those before, and itself
                torch.index_select(moves, 2, segments[seen], out=buffer).mul_(doubled.pairs[..., seen, :])
                key = ComplexPairs(buffer, doubled.unrotated[..., seen, :]).vectors(dtype).flatten(0, 1)[None]
                yield queries[:, :, span], key, value[:, :, seen]

        return attend_causal_each(document_segments(), inputs.scaling)[0]

    def _moves(self) -> Tensor:
        """Return what moves each segment for each document's queries, (N, Hkv, G, 1 + N, pairs) complex.

        Positions count from the document's own beginning, which is 0; all other segments are before it.
        """
        before = -distances(self._between_documents(), self.lengths)  # (N, Hq, N)
        before.diagonal(dim1=0, dim2=2).zero_()
        prefix = (self.lengths - self.end).float()[:, None, None].expand(-1, before.shape[1], 1)
        positions = torch.cat((prefix, before), dim=-1).transpose(0, 1)  # (Hq, N, 1 + N)
        phases = torch.unflatten(self.inputs.rotate.phases(positions.flatten(1)[None])[0], 1, positions.shape[1:])
        phases = phases / phases.abs()  # scaling is in the segment-relative rotation
        return torch.unflatten(phases.transpose(0, 1), 1, (-1, self.groups))

    def _between_documents(self) -> Tensor:
        """Return how much each document matters to each in each head, (N, Hq, N); -inf for itself."""
        inputs, n_documents = self.inputs, len(self.lengths)
        importance = self.share.new_zeros(n_documents, inputs.query.shape[1], n_documents)
        if n_documents > 2 and self.relative_phases.shape[-1]:  # of two the other is nearest; without RoPE none is
            query = torch.unflatten(inputs.query[0], 0, (-1, self.groups))  # (Hkv, G, Tq, D)
            key, share, begin = (
                repeat_twice(inputs.key[0, :, self.documents]),
                repeat_twice(self.share),
                self.documents.start,
            )
            rows = []
            for span in self.spans[1:]:
                other_documents = slice(span.stop - begin, self.end + span.start - 2 * begin)
                others_key, others_share = key[:, other_documents], share[other_documents]
                rows.append(document_importance(query[:, :, span], others_key, others_share, inputs.scaling))
            importance = torch.stack(rows).flatten(1, 2)
        importance.diagonal(dim1=0, dim2=2).fill_(float("-inf"))
        return importance

    def _relative_query(self) -> ComplexPairs:
        """Return the queries of prefix and documents, segment-relative; for passes that read the whole prompt."""
        phases = self.relative_phases[:, : self.end]
        if phases.shape[0] > 1:
            phases = phases.repeat_interleave(self.groups, dim=0)
        return self.query.tokens(slice(0, self.end)).rotated(phases)

    def read_after(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the output of the tokens ``first`` to ``last``, (Hq, m, D), and the last one's attention, (1, Tk).

        Keys keep their position in the segment; queries are moved to their positions relative to each segment's
        beginning.
        """
        inputs = self.inputs
        query = self.query.tokens(slice(first - inputs.start, last - inputs.start))
        plain = torch.unflatten(query.vectors(), 0, (-1, self.groups))  # (Hkv, G, m, D)
        moved = query.rotated(self._turns_after(plain.flatten(1, 2), first)).vectors()  # (N + 2, Hq, m, D)
        moved = torch.unflatten(moved, 1, (-1, self.groups)).flatten(2, 3) * inputs.scaling  # (N + 2, Hkv, G m, D)
        segment_relative = self.relative_key.tokens(slice(0, last)).vectors().transpose(1, 2)  # (Hkv, D, Tk)
        spans = (*self.spans, slice(self.end, last))
        scores = torch.cat(
            [states @ segment_relative[:, :, span] for states, span in zip(moved, spans, strict=True)], dim=-1
        )
        scores = scores.view(query.pairs.shape[0], last - first, last)  # (Hq, m, Tk)
        index = torch.arange(last, device=scores.device)
        weights = scores.masked_fill_(index > index[first:, None], float("-inf")).softmax(dim=-1)
        out = weights.view(plain.shape[0], -1, last) @ inputs.value[0, :, :last].float()
        return out.view(*scores.shape[:2], -1), weights[:, -1].mean(dim=0)[None]

    def _turns_after(self, plain: Tensor, first: int) -> Tensor:
        """Return what moves the queries from ``first`` on for each segment, (N + 2, Hq, m, pairs) complex.

        Shapes:
            plain: (Hkv, G m, D), the queries unrotated.
        """
        importance = token_importance(plain, self.plain_key, self.share, self.inputs.scaling)
        begin = self.end - distances(importance, self.lengths)  # (Hkv, G m, N)
        begin = torch.nn.functional.pad(begin, (1, 0))  # the prefix begins at 0
        begin = torch.nn.functional.pad(begin, (0, 1), value=float(self.end))
        begin = begin.view(self.inputs.query.shape[1], -1, len(self.spans) + 1)  # (Hq, m, N + 2)
        index = torch.arange(first, first + begin.shape[1], device=begin.device)
        positions = (index[:, None] - begin).transpose(1, 2)  # (Hq, N + 2, m)
        phases = self.inputs.rotate.phases(positions.flatten(1)[None])[0]
        return torch.unflatten(phases, 1, positions.shape[1:]).transpose(0, 1)
