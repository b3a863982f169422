"""PINE: attention between documents that orders them by importance for each query; no T x T tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import attend_with_lse
from rag_posfix.attention.causal import attend_causal_each, products_are_faster, tiles
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
        query: (H, R, D) and key: (H, S, D), unrotated; scores have their dtype. share: (S, N), see ``shares``.
        returns: (H, R, N) float32.
    """
    if key.device.type == "cpu":
        key = key.contiguous()  # a product with a transposed view costs five times the copy
    scores = torch.bmm(query, key.transpose(1, 2)).float()
    return scores.mul_(scaling).softmax(dim=-1) @ share


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


def importance_by_lse(query: Tensor, key: Tensor, lengths: Sequence[int], own: Tensor, scaling: float) -> Tensor:
    """Return how much each document matters to each other one, in each head: as ``document_importance`` of each.

    Formula: with lse_j(m) the log-sum-exp of the scores of token m against the keys of document j,
        Imp(D_i -> D_j) = sum_{m in D_i} softmax_{j /= i}(lse_j(m)) / n_j.

    Cost: one fused call where all documents have one length, else one for each. No score is held.

    Shapes:
        query: (Hkv, G S, D), the queries of a key head's group end to end, and key: (Hkv, S, D), unrotated.
        own: (N, S) bool, whether a token belongs to a document.
        returns: (N, Hkv G, N) float32; 0 for the document itself and for empty ones.
    """
    if len(set(lengths)) == 1:
        by_document = torch.unflatten(key, 1, (len(lengths), -1)).transpose(0, 1)
        lse = attend_with_lse(query.expand(len(lengths), -1, -1, -1), by_document, by_document, scaling)[1]
    else:
        nothing = query.new_full(query.shape[:2], float("-inf"), dtype=torch.float32)
        lse = torch.stack(
            [
                attend_with_lse(query[None], keys[None], keys[None], scaling)[1][0] if keys.shape[1] else nothing
                for keys in torch.split(key, list(lengths), dim=1)
            ]
        )
    lse = lse.reshape(len(lengths), -1, own.shape[1])  # (N, Hq, S)
    shares_of_tokens = lse.masked_fill(own[:, None], float("-inf")).softmax(dim=0).nan_to_num_()
    summed = shares_of_tokens @ own.T.float()  # (N_j, Hq, N_i)
    return (summed / own.sum(dim=1).clamp(min=1)[:, None, None]).transpose(0, 2)


def distances(importance: Tensor, lengths: Tensor) -> Tensor:
    """Return how far before the end of the documents each begins when the most important one is last.

    Formula: distance(j) = n_j + sum of the lengths of all documents more important than j. Of two that are equally
        important the one with the lower index counts as more important.

    Shapes:
        importance: (..., N). lengths: (N,). returns: (..., N) int64.
    """
    order = importance.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, lengths[order].cumsum(dim=-1))


SPARE_POSITIONS = 256
"""The table of rotations grows by so many positions at a time."""

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
        own: (N, S) bool, whether a token belongs to document j.
        counts: The same as ``lengths``, for the host.
    """

    rotated: ClassVar[Rotated] = Rotated.NEITHER

    spans: tuple[slice, ...]
    lengths: Tensor
    segments: Tensor
    offsets: Tensor
    share: Tensor
    own: Tensor
    counts: tuple[int, ...]

    @classmethod
    def over(cls, layout: Layout) -> ImportanceOrderedAttention:
        """Return the attention over a prompt's passages."""
        spans = (layout.prefix, *layout.passages)
        lengths = torch.tensor([len(span) for span in layout.passages])
        share = shares(lengths)
        return cls(
            spans=tuple(span.slice for span in spans),
            lengths=lengths,
            segments=torch.repeat_interleave(torch.tensor([len(span) for span in spans])),
            offsets=torch.cat([torch.arange(len(span)) for span in spans]),
            share=share,
            own=share.T > 0,
            counts=tuple(map(len, layout.passages)),
        )

    def on(self, device: torch.device) -> ImportanceOrderedAttention:
        """Return the same with its tensors on a device."""
        return replace(
            self,
            lengths=self.lengths.to(device),
            segments=self.segments.to(device),
            offsets=self.offsets.to(device),
            share=self.share.to(device),
            own=self.own.to(device),
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring documents of one length: the number of the first, how many, where the first ends, their length."""

    first: int
    count: int
    stop: int
    length: int


def batches(documents: Sequence[slice], most: int) -> Iterator[_Batch]:
    """Yield neighbouring documents of one length, at most ``most`` together; none for empty ones."""
    first = 0
    for length, group in itertools.groupby(document.stop - document.start for document in documents):
        count = len(list(group))
        for i in range(first, first + count, most):
            if length:
                yield _Batch(i, min(most, first + count - i), documents[i].stop, length)
        first += count


def windows(states: Tensor, start: int, batch: _Batch, size: int) -> Tensor:
    """Return ``size`` tokens from ``start`` on, for each further document of a batch its length later; a view.

    Shapes:
        states: (H, T, X) or (T,). returns: (H, count, size, X) or (count, size).
    """
    dim = 1 if states.dim() == 3 else 0
    pieces = states.narrow(dim, start, size + (batch.count - 1) * batch.length).unfold(dim, size, batch.length)
    return pieces.transpose(-1, -2) if dim else pieces


def most_numbers(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: few calls on a device, the processor's cache on a CPU."""
    return 2**21 if device.type == "cpu" else 2**26


class _Pass:
    """One layer's attention in one forward pass. The batch axis is left out throughout.

    ``relative_...``: rotated to the position of the token in its segment. ``grouped``: (Hkv, G, ...) instead of
    (Hq, ...), so that the G query heads of a key head broadcast over it.

    The keys of prefix and documents, rotated in their segments, are kept for the tokens that follow, in the dtype of
    the cache: half as much memory again as the cache takes.
    """

    def __init__(self, plan: ImportanceOrderedAttention, inputs: AttentionInput) -> None:
        self.plan, self.inputs, self.spans, self.end = plan, inputs, plan.spans, len(plan.offsets)
        self.dtype = inputs.query.dtype
        self.groups = inputs.query.shape[1] // inputs.key.shape[1]
        self.documents = slice(plan.spans[0].stop, self.end)
        self.table = self._phases_of_positions(inputs.key.shape[2])
        self.n_pairs = self.table.shape[-1]
        self.query = ComplexPairs.of(inputs.query[0], self.n_pairs)  # (Hq, Tq, D)
        if inputs.start == 0 or inputs.layer not in inputs.kept:
            self.phases = self.table[:, plan.offsets]  # (1 | Hkv, P + S, pairs)
            self.relative_key = ComplexPairs.of(inputs.key[0, :, : self.end], self.n_pairs).rotated(self.phases)
            inputs.kept[inputs.layer] = self.relative_key.vectors(self.dtype)
        self.kept_key = inputs.kept[inputs.layer]  # (Hkv, P + S, D)
        if inputs.start == 0:
            phases = self.phases if len(self.phases) == 1 else self.phases.repeat_interleave(self.groups, dim=0)
            self.relative_query = self.query.tokens(slice(0, self.end)).rotated(phases).vectors(self.dtype)

    def _phases_of_positions(self, n_tokens: int) -> Tensor:
        """Return the phases of the positions 0, 1, 2, .. of all tokens and some more, (1 | Hkv, T', pairs) complex.

        Layers that rotate alike share them, and they are kept: all rotations are looked up.
        """
        inputs = self.inputs
        name = (inputs.rotate.name, inputs.key.device)
        table = inputs.kept.get(name)
        if table is None or table.shape[1] < n_tokens:
            length = (n_tokens // SPARE_POSITIONS + 1) * SPARE_POSITIONS
            positions = torch.arange(length, device=inputs.key.device, dtype=torch.float32)
            table = inputs.kept[name] = inputs.rotate.phases(positions[None])[0]
        return table

    def _look_up(self, positions: Tensor) -> Tensor:
        """Return the phases of positions (Hq, ..), (Hq, .., pairs) complex."""
        if self.table.shape[0] == 1:
            return self.table[0][positions]
        heads = torch.arange(len(positions), device=positions.device) // self.groups
        return self.table[heads.view(-1, *(1 for _ in positions.shape[1:])), positions]

    def read_prefix(self) -> Tensor:
        """Return the output of the prefix, (Hq, P, D): causal, at its positions."""
        span = self.spans[0]
        if span.start == span.stop:
            return self.inputs.query[0, :, :0]
        query, key = self.relative_query[None, :, span], self.kept_key[None, :, span]
        return attend_with_lse(query, key, self.inputs.value[:, :, span], self.inputs.scaling, causal=True)[0][0]

    def read_documents(self) -> Tensor:
        """Return the output of the documents, (Hq, S, D).

        Queries keep their own position; all other segments are moved to their positions relative to the document's
        beginning.
        """
        value = self.inputs.value[0, :, : self.end]
        # Moved keys differ between the heads of a group, and the kernels need as many heads of values.
        value = repeat_twice(value.repeat_interleave(self.groups, dim=0))  # (Hq, 2 (P + S), D)
        segments = (
            (self._of_each(self.relative_query, batch), key, self._window(value, batch).transpose(0, 1))
            for batch, key in self._moved_keys()
        )
        return attend_causal_each(segments, self.inputs.scaling)[0]

    def _of_each(self, states: Tensor, batch: _Batch) -> Tensor:
        """Return the tokens of each document of a batch, (count, Hq, n, D)."""
        span = slice(batch.stop - batch.length, batch.stop + (batch.count - 1) * batch.length)
        return torch.unflatten(states[:, span], 1, (batch.count, batch.length)).transpose(0, 1)

    def _window(self, doubled: Tensor, batch: _Batch) -> Tensor:
        """Return what each document of a batch sees of prefix and documents: those after it, .., itself; a view."""
        return windows(doubled, batch.stop, batch, self.end)

    def _moved_keys(self) -> Iterator[tuple[_Batch, Tensor]]:
        """Yield batches of documents, and the keys of each as its queries see them, (count, Hq, P + S, D).

        In the order of a circle: those after the document, the prefix, those before it, and itself.
        """
        moves = self._moves()  # (Hkv, G, N (1 + N), pairs)
        pairs, unrotated = repeat_twice(self.relative_key.pairs), repeat_twice(self.relative_key.unrotated)
        segments, n_segments = repeat_twice(self.plan.segments, 0), len(self.spans)
        capacity = most_numbers(moves.device) // max(1, self.inputs.query.shape[1] * self.end * 2 * self.n_pairs)
        buffer = moves.new_empty(0)
        for batch in batches(self.spans[1:], max(1, capacity)):
            index = self._window(segments, batch)  # (count, P + S)
            first = torch.arange(batch.first, batch.first + batch.count, device=index.device) * n_segments
            index = (index + first[:, None]).flatten()
            shape = (*moves.shape[:2], index.shape[0], moves.shape[-1])
            buffer = buffer if buffer.shape == shape else moves.new_empty(shape)
            torch.index_select(moves, 2, index, out=buffer)
            moved = torch.unflatten(buffer, 2, (batch.count, self.end))  # (Hkv, G, count, P + S, pairs)
            moved.mul_(self._window(pairs, batch)[:, None])
            still = self._window(unrotated, batch)[:, None] if unrotated.shape[-1] else unrotated
            yield batch, ComplexPairs(moved, still).vectors(self.dtype).flatten(0, 1).transpose(0, 1)

    def _moves(self) -> Tensor:
        """Return what moves each segment for each document's queries, (Hkv, G, N (1 + N), pairs) complex.

        Positions count from the document's own beginning, which is 0; all other segments are before it.
        """
        back = distances(self._between_documents(), self.plan.lengths)  # (N, Hq, N)
        back.diagonal(dim1=0, dim2=2).zero_()
        prefix = (self.end - self.plan.lengths)[:, None, None].expand(-1, back.shape[1], 1)
        back = torch.cat((prefix, back), dim=-1).transpose(0, 1).flatten(1)  # (Hq, N (1 + N))
        phases = self._look_up(back).conj_physical()
        phases = phases / phases.abs()  # scaling is in the segment-relative rotation
        return torch.unflatten(phases, 0, (-1, self.groups))

    def _between_documents(self) -> Tensor:
        """Return how much each document matters to each in each head, (N, Hq, N); -inf for itself."""
        inputs, n_documents = self.inputs, len(self.plan.lengths)
        if n_documents < 3 or not self.n_pairs:  # of two the other is nearest; without RoPE none is
            importance = self.plan.share.new_zeros(n_documents, inputs.query.shape[1], n_documents)
        elif products_are_faster(inputs.query):
            importance = self._importance_by_products()
        else:
            key = inputs.key[0, :, self.documents]
            query = inputs.query[0, :, self.documents].reshape(key.shape[0], -1, key.shape[2])
            importance = importance_by_lse(query, key, self.plan.counts, self.plan.own, inputs.scaling)
        importance.diagonal(dim1=0, dim2=2).fill_(float("-inf"))
        return importance

    def _importance_by_products(self) -> Tensor:
        """Return the importance of all documents to each, (N, Hq, N), one document at a time."""
        inputs = self.inputs
        query = torch.unflatten(inputs.query[0], 0, (-1, self.groups))  # (Hkv, G, Tq, D)
        key, share = repeat_twice(inputs.key[0, :, self.documents]), repeat_twice(self.plan.share)
        begin = self.documents.start
        rows = []
        for span in self.spans[1:]:
            others = slice(span.stop - begin, self.end + span.start - 2 * begin)  # those after, then those before
            own_query = query[:, :, span]
            rows.append(document_importance(own_query, key[:, others], share[others], inputs.scaling))
        return torch.stack(rows).flatten(1, 2)

    def read_after(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the output of the tokens ``first`` to ``last``, (Hq, m, D), and the last one's attention, (1, Tk).

        Keys keep their position in the segment; queries are moved to their positions relative to each segment's
        beginning.
        """
        inputs, start = self.inputs, self.inputs.start
        rows = slice(first - start, last - start)
        plain = inputs.query[0, :, rows].reshape(inputs.key.shape[1], -1, inputs.query.shape[3])
        moved = self.query.tokens(rows).rotated(self._turns_after(plain, first))
        versions = (moved.vectors() * inputs.scaling).to(self.dtype)  # (N + 2, Hq, m, D)
        versions = torch.unflatten(versions, 1, (-1, self.groups)).flatten(2, 3)  # (N + 2, Hkv, G m, D)
        after = ComplexPairs.of(inputs.key[0, :, self.end : last], self.n_pairs)
        after_key = after.rotated(self.table[:, : last - self.end]).vectors(self.dtype)
        scores = torch.cat((self._scores_of_segments(versions[:-1]), versions[-1] @ after_key.transpose(1, 2)), dim=-1)
        scores = scores.view(inputs.query.shape[1], last - first, last)  # (Hq, m, Tk)
        if last - first > 1:
            index = torch.arange(last, device=scores.device)
            scores.masked_fill_(index > index[first:, None], float("-inf"))
        weights = scores.softmax(dim=-1, dtype=torch.float32)
        out = weights.to(self.dtype).view(plain.shape[0], -1, last) @ inputs.value[0, :, :last].to(self.dtype)
        return out.view(*scores.shape[:2], -1), weights[:, -1].mean(dim=0)[None]

    def _scores_of_segments(self, versions: Tensor) -> Tensor:
        """Return the scores of prefix and documents, (Hkv, G m, P + S).

        A few queries are multiplied with all keys in each version, and the scores of a segment's own version are
        taken: one product. That is more arithmetic, and less work, than a product for each segment.

        Shapes:
            versions: (1 + N, Hkv, G m, D), the queries as each segment needs them.
        """
        n_scores = versions[..., 0].numel() * self.end
        several = versions.shape[2] > self.groups  # tokens: the suffix of the prompt
        if n_scores > 4 * most_numbers(versions.device) or (several and versions.device.type == "cpu"):
            keys = torch.split(self.kept_key, [span.stop - span.start for span in self.spans], dim=1)
            pieces = [states @ key.transpose(1, 2) for states, key in zip(versions, keys, strict=True)]
            return torch.cat(pieces, dim=-1)
        n_versions, n_key_heads, n_queries, _ = versions.shape
        every = versions.transpose(0, 1).flatten(1, 2) @ self.kept_key.transpose(1, 2)  # (Hkv, (1 + N) G m, P + S)
        every = every.view(n_key_heads, n_versions, n_queries, self.end)
        own_version = self.plan.segments.expand(n_key_heads, 1, n_queries, -1)
        return every.gather(1, own_version)[:, 0]

    def _turns_after(self, plain: Tensor, first: int) -> Tensor:
        """Return what moves the queries from ``first`` on for each segment, (N + 2, Hq, m, pairs) complex.

        Shapes:
            plain: (Hkv, G m, D), the queries unrotated.
        """
        inputs = self.inputs
        importance = token_importance(plain, inputs.key[0, :, self.documents], self.plan.share, inputs.scaling)
        far = distances(importance, self.plan.lengths).view(inputs.query.shape[1], -1, len(self.spans) - 1)
        # The prefix begins at 0, documents ``far`` before the end of the last, what follows there.
        far = torch.nn.functional.pad(torch.nn.functional.pad(far, (1, 0), value=self.end), (0, 1))  # (Hq, m, N + 2)
        index = torch.arange(first - self.end, first - self.end + far.shape[1], device=far.device)
        return self._look_up((far + index[:, None]).permute(0, 2, 1)).transpose(0, 1)
