"""PINE: attention between documents that orders them by importance for each query; no T x T tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rag_posfix.attention.masks import attend_segments, attend_whole, attend_with_lse
from rag_posfix.attention.rope import quarter_turn, rotate_half_split
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, RopeAppliedTo


def document_importance(query: Tensor, key: Tensor, members: Tensor, scaling: float) -> Tensor:
    """Return how much attention without positions each query pays to each document, in all.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: s(n) = softmax_n(q^T k_n scaling); sum_{n in j} s(n): attention whose values say which document a token
        belongs to.

    Cost: one fused call for each D documents; no score is held. Sums are rounded to the dtype of ``query``; in float16
        those below 6e-8 are 0.

    Shapes:
        query: (B, Hq, R, D) and key: (B, Hkv, S, D), unrotated. members: (B, Hkv, S, N'), 1 where a token belongs to
        a document, N' a multiple of D. returns: (B, Hq, R, N') in the dtype of ``query``.
    """
    pieces = [
        attend_whole(query, key, members[..., first : first + key.shape[3]], scaling)[0]
        for first in range(0, members.shape[3], key.shape[3])
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=3)


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

MAX_PADDED = 2
"""Prefix and documents are padded to one length where that makes them at most so many times as many tokens."""

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
        offsets: (T,) position of each token inside of its segment, or among the tokens after the documents.
        members: (S, N) float32, 1 where a token belongs to document j and 0 elsewhere.
        padding: ((1 + N) n,) the token of each place where prefix and documents are padded to the longest, n tokens;
            empty where most would be padding.
        columns: (P + S,) the place of each token there.
    """

    rotated: ClassVar[RopeAppliedTo] = RopeAppliedTo.NEITHER

    spans: tuple[slice, ...]
    lengths: Tensor
    segments: Tensor
    offsets: Tensor
    members: Tensor
    padding: Tensor
    columns: Tensor

    @classmethod
    def over(cls, layout: Layout) -> ImportanceOrderedAttention:
        """Return the attention over a prompt's passages."""
        spans = (layout.prefix, *layout.passages)
        lengths = torch.tensor([len(span) for span in layout.passages])
        documents = torch.arange(len(lengths))
        segments = torch.repeat_interleave(torch.tensor([len(span) for span in spans]))
        offsets = torch.cat([torch.arange(len(span)) for span in (*spans, layout.suffix)])
        longest = max(map(len, spans))
        columns = segments * longest + offsets[: len(segments)]
        n_padded = len(spans) * longest if len(spans) * longest <= MAX_PADDED * len(columns) else 0
        padding = torch.zeros(n_padded, dtype=torch.int64)
        if n_padded:
            padding[columns] = torch.arange(len(columns))
        return cls(
            spans=tuple(span.slice for span in spans),
            lengths=lengths,
            segments=segments,
            offsets=offsets,
            members=(documents.repeat_interleave(lengths)[:, None] == documents).float(),
            padding=padding,
            columns=columns,
        )

    def by_segment(self, states: Tensor) -> Tensor:
        """Return (Hkv, P + S, D) as (Hkv, 1 + N, n, D), n the longest segment; as it is without padding."""
        if not len(self.padding):
            return states.contiguous()
        return torch.unflatten(states.index_select(1, self.padding), 1, (len(self.spans), -1))

    def on(self, device: torch.device) -> ImportanceOrderedAttention:
        """Return the same with its tensors on a device; the indices are uploaded together."""
        names = ("lengths", "segments", "offsets", "padding", "columns")
        indices = [getattr(self, name) for name in names]
        moved = torch.split(torch.cat(indices).to(device), [len(index) for index in indices])
        on_device: dict[str, Any] = dict(zip(names, moved, strict=True))
        return replace(self, members=self.members.to(device), **on_device)

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
        attention_pass, end, n_key = _Pass(self, inputs), self.spans[-1].stop, inputs.key.shape[2]
        outs = [attention_pass.read_prompt()] if inputs.start == 0 else []
        last_attention = None
        for first in range(max(inputs.start, end), n_key, ROWS):
            out, last_attention = attention_pass.read_after(first, min(first + ROWS, n_key))
            outs.append(out)
        return torch.cat([out.to(inputs.query.dtype) for out in outs], dim=1)[None], last_attention


def repeat_twice(states: Tensor) -> Tensor:
    """Repeat the tokens of (.., T, X): all documents but one are then one slice, in cyclic order."""
    return torch.cat((states, states), dim=-2)


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
        states: (.., T, X). returns: (.., count, size, X).
    """
    pieces = states.narrow(-2, start, size + (batch.count - 1) * batch.length)
    return pieces.unfold(-2, size, batch.length).transpose(-1, -2)


def max_elements(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: few calls on a device, the processor's cache on a CPU."""
    return 2**21 if device.type == "cpu" else 2**26


def _rotated(states: Tensor, turns: Tensor) -> Tensor:
    """Return states (.., H, T, D) rotated by (.., H, T, 2, rotated), cos and sin."""
    return rotate_half_split(states, *turns.unbind(-2))


class _Pass:
    """One layer's attention in one forward pass. The batch axis is left out throughout.

    ``relative_...``: rotated to the position of the token in its segment.

    The keys of prefix and documents, rotated in their segments, are kept for the tokens that follow, in the dtype of
    the cache: half as much memory again as the cache takes, and at most as much with padding.
    """

    def __init__(self, plan: ImportanceOrderedAttention, inputs: AttentionInput) -> None:
        self.plan, self.inputs, self.spans, self.end = plan, inputs, plan.spans, plan.spans[-1].stop
        self.dtype, n_key_heads = inputs.query.dtype, inputs.key.shape[1]
        self.groups = inputs.query.shape[1] // n_key_heads
        self.documents = slice(plan.spans[0].stop, self.end)
        self.divisors = plan.lengths.clamp(min=1)
        self.members = self._members_of_documents()
        self.unit, self.scaled = self._rotations_of_positions(inputs.key.shape[2])
        self.n_rotated = self.unit.shape[-1]
        self.n_still = inputs.key.shape[3] - self.n_rotated
        if inputs.start == 0 or inputs.layer not in inputs.kept:
            at = self.scaled[:, plan.offsets]  # (1 | Hkv, T, 2, rotated)
            keys = _rotated(inputs.key[0, :, : len(plan.offsets)].to(self.dtype), at[:, : inputs.key.shape[2]])
            self.relative_key = keys[:, : self.end]
            inputs.kept[inputs.layer] = plan.by_segment(self.relative_key)
        self.kept_key = inputs.kept[inputs.layer]  # (Hkv, 1 + N, n, D), or (Hkv, P + S, D) without padding
        if inputs.start == 0:
            self.after_key = keys[:, self.end :]
            at = at[:, : self.end]
            at = at if len(at) == 1 else at.repeat_interleave(self.groups, dim=0)
            self.relative_query = _rotated(inputs.query[0, :, : self.end], at)
            most = max(1, max_elements(inputs.query.device) // (self.groups * self.end * inputs.key.shape[3]))
            self.batches = list(batches(self.spans[1:], max(1, most // n_key_heads)))
            self.key_heads = [slice(head, min(head + most, n_key_heads)) for head in range(0, n_key_heads, most)]
        else:
            after = inputs.key[0, :, self.end :].to(self.dtype)
            self.after_key = _rotated(after, self.scaled[:, : after.shape[1]])

    def _members_of_documents(self) -> Tensor:
        """Return which document a token belongs to, (S, N') in the dtype of the queries, N' a multiple of D; kept."""
        name, kept = ("members", self.dtype, self.inputs.key.device), self.inputs.kept
        if name not in kept:
            members = self.plan.members.to(self.dtype)
            kept[name] = torch.nn.functional.pad(members, (0, -members.shape[1] % self.inputs.key.shape[3]))
        return kept[name]

    def _rotations_of_positions(self, n_tokens: int) -> Tensor:
        """Return cos and sin of the positions 0, 1, 2, .. of all tokens and some more, (2, 1 | Hkv, T', 2, rotated).

        First without what the model scales rotated vectors by, then with it. Layers that rotate alike share them, and
        they are kept: all rotations are looked up.
        """
        inputs = self.inputs
        name = (inputs.rotate.name, self.dtype, inputs.key.device)
        table = inputs.kept.get(name)
        if table is None or table.shape[2] < n_tokens:
            length = (n_tokens // SPARE_POSITIONS + 1) * SPARE_POSITIONS
            positions = torch.arange(length, device=inputs.key.device, dtype=torch.float32)
            phases = inputs.rotate.phases(positions[None])[0]
            pairs = torch.view_as_real(torch.stack((phases / phases.abs(), phases))).transpose(-1, -2)
            table = inputs.kept[name] = torch.cat((pairs, pairs), dim=-1).to(self.dtype)
        return table

    def _look_up(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return cos and sin of positions (Hq, ..), (Hq, .., 2, rotated)."""
        if len(table) == 1:
            return table[0][positions]
        heads = torch.arange(len(positions), device=positions.device) // self.groups
        return table[heads.view(-1, *(1 for _ in positions.shape[1:])), positions]

    def read_prompt(self) -> Tensor:
        """Return the output of prefix and documents, (Hq, P + S, D).

        Queries keep their own position; all segments before them are moved to their positions relative to the
        document's beginning.
        """
        inputs, span = self.inputs, self.spans[0]
        out = torch.empty_like(self.relative_query)
        if span.start < span.stop:
            prefix = self.relative_query[None, :, span], self.relative_key[None, :, span], inputs.value[:, :, span]
            out[:, span] = attend_with_lse(*prefix, inputs.scaling, causal=True)[0][0]
        # Moved keys differ between the heads of a group, and the kernels need as many heads of values.
        values = repeat_twice(inputs.value[0, :, : self.end].repeat_interleave(self.groups, dim=0))
        for batch, heads, key in self._moved_keys():
            query = self._of_each(self.relative_query[heads], batch)
            value = windows(values[heads], batch.stop, batch, self.end).transpose(0, 1)
            others = self.end - batch.length
            read, _ = attend_segments(query, key, value, inputs.scaling, others, [(0, others)])
            self._of_each(out[heads], batch).copy_(read)
        return out

    def _of_each(self, states: Tensor, batch: _Batch) -> Tensor:
        """Return the tokens of each document of a batch, (count, Hq, n, D)."""
        span = slice(batch.stop - batch.length, batch.stop + (batch.count - 1) * batch.length)
        return torch.unflatten(states[:, span], 1, (batch.count, batch.length)).transpose(0, 1)

    def _moved_keys(self) -> Iterator[tuple[_Batch, slice, Tensor]]:
        """Yield batches of documents, query heads, and the keys that their queries see, (count, heads, P + S, D).

        In the order of a circle: those after the document, the prefix, those before it, and itself.
        """
        turns = self._moves()  # (Hq, N (1 + N), 2, D)
        if self.n_still:
            turned = torch.nn.functional.pad(quarter_turn(self.relative_key[..., : self.n_rotated]), (0, self.n_still))
        else:
            turned = quarter_turn(self.relative_key)
        keys = repeat_twice(torch.stack((self.relative_key, turned)))  # (2, Hkv, 2 (P + S), D)
        for batch, key_heads in itertools.product(self.batches, self.key_heads):
            heads = slice(key_heads.start * self.groups, key_heads.stop * self.groups)
            of_tokens = turns[heads].index_select(1, self._rows_of_moves(batch))
            of_tokens = of_tokens.view(-1, self.groups, batch.count, self.end, 2, keys.shape[3])
            cos, sin = of_tokens.unbind(-2)  # (Hkv, G, count, P + S, D)
            key, turned = windows(keys[:, key_heads], batch.stop, batch, self.end).unsqueeze(2).unbind()
            yield batch, heads, (cos * key).addcmul_(sin, turned, value=-1).flatten(0, 1).transpose(0, 1)

    def _rows_of_moves(self, batch: _Batch) -> Tensor:
        """Return which move each token that a batch of documents sees has, (count (P + S),); kept for other layers."""
        name, kept = ("moves", batch, self.inputs.key.device), self.inputs.kept
        if name not in kept:
            segments = repeat_twice(self.plan.segments[:, None])
            rows = torch.arange(batch.first, batch.first + batch.count, device=segments.device) * len(self.spans)
            kept[name] = (windows(segments, batch.stop, batch, self.end)[..., 0] + rows[:, None]).flatten()
        return kept[name]

    def _moves(self) -> Tensor:
        """Return cos and sin of how far back each segment is for each document's queries, (Hq, N (1 + N), 2, D).

        Positions count from the document's own beginning, which is 0; all other segments are before it.
        """
        back = distances(self._between_documents(), self.plan.lengths)  # (N, Hq, N)
        back.diagonal(dim1=0, dim2=2).zero_()
        prefix = (self.end - self.plan.lengths.view(-1, 1, 1)).expand(-1, back.shape[1], 1)
        back = torch.cat((prefix, back), dim=-1).transpose(0, 1).flatten(1)  # (Hq, N (1 + N))
        turns = self._look_up(self.unit, back)  # scaling is in the segment-relative rotation
        if not self.n_still:
            return turns
        still = turns.new_zeros((*turns.shape[:-1], self.n_still))
        still[..., 0, :] = 1.0
        return torch.cat((turns, still), dim=-1)

    def _between_documents(self) -> Tensor:
        """Return how much each document matters to each in each head, (N, Hq, N); -inf for itself.

        Formula: Imp(D_i -> D_j) = sum_{m in D_i} sum_{n in D_j} s(m, n) / n_j, with ``document_importance`` over the
            tokens of all documents but D_i.
        """
        inputs, lengths, documents = self.inputs, self.plan.lengths, self.documents
        n_documents, (n_tokens, n_padded) = len(lengths), self.members.shape
        importance = torch.zeros((n_documents, inputs.query.shape[1], n_padded), device=lengths.device)
        # Of two documents the other is nearest; without RoPE none is.
        if self.n_rotated and sum(span.start < span.stop for span in self.spans[1:]) > 2:
            key = repeat_twice(inputs.key[0, :, documents])
            members = repeat_twice(self.members).expand(key.shape[0], -1, -1)
            for batch in self.batches:
                others = batch.stop - documents.start, batch, n_tokens - batch.length
                keys, values = (windows(states, *others).transpose(0, 1) for states in (key, members))
                paid = document_importance(self._of_each(inputs.query[0], batch), keys, values, inputs.scaling)
                importance[batch.first : batch.first + batch.count] = paid.sum(dim=2, dtype=torch.float32)
        importance = importance[..., :n_documents] / self.divisors
        importance.diagonal(dim1=0, dim2=2).fill_(float("-inf"))
        return importance

    def read_after(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the output of the tokens ``first`` to ``last``, (Hq, m, D), and the last one's attention, (1, Tk).

        Keys keep their position in the segment; queries are moved to their positions relative to each segment's
        beginning.
        """
        inputs, n_key_heads = self.inputs, self.inputs.key.shape[1]
        query = inputs.query[:, :, first - inputs.start : last - inputs.start]
        versions = _rotated(query, self._turns_after(query, first))  # (N + 2, Hq, m, D)
        versions = versions.reshape(len(self.spans) + 1, n_key_heads, -1, query.shape[3])  # (N + 2, Hkv, G m, D)
        after = versions[-1] @ self.after_key[:, : last - self.end].transpose(1, 2)
        scores = torch.cat((self._scores_of_segments(versions[:-1]), after), dim=-1).float() * inputs.scaling
        scores = scores.view(query.shape[1], last - first, last)  # (Hq, m, Tk)
        if last - first > 1:
            index = torch.arange(last, device=scores.device)
            scores.masked_fill_(index > index[first:, None], float("-inf"))
        weights = scores.softmax(dim=-1)
        out = weights.to(self.dtype).view(n_key_heads, -1, last) @ inputs.value[0, :, :last].to(self.dtype)
        return out.view(*scores.shape[:2], -1), weights[:, -1].mean(dim=0)[None]

    def _scores_of_segments(self, versions: Tensor) -> Tensor:
        """Return the scores of prefix and documents, (Hkv, G m, P + S), each by its own version of the queries.

        One product for all segments, which are padded to the longest; where that is mostly padding a product for each.

        Shapes:
            versions: (1 + N, Hkv, G m, D), the queries as each segment needs them.
        """
        if self.kept_key.dim() == 3:
            keys = torch.split(self.kept_key, [span.stop - span.start for span in self.spans], dim=1)
            pieces = [states @ key.transpose(1, 2) for states, key in zip(versions, keys, strict=True)]
            return torch.cat(pieces, dim=-1)
        padded = versions.transpose(0, 1) @ self.kept_key.transpose(2, 3)  # (Hkv, 1 + N, G m, n)
        return padded.transpose(1, 2).flatten(2).index_select(2, self.plan.columns)

    def _turns_after(self, query: Tensor, first: int) -> Tensor:
        """Return cos and sin of the positions of the queries from ``first`` on, (N + 2, Hq, m, 2, rotated).

        Relative to the prefix, to each document and to what follows the documents.

        Shapes:
            query: (1, Hq, m, D), unrotated.
        """
        inputs, lengths = self.inputs, self.plan.lengths
        key = inputs.key[:, :, self.documents]
        members = self.members.expand(1, key.shape[1], -1, -1)
        paid = document_importance(query, key, members, inputs.scaling)[0, ..., : len(lengths)]
        far = distances(paid.float() / self.divisors, lengths)  # (Hq, m, N)
        # The prefix begins at 0, documents ``far`` before the end of the last, what follows there.
        far = torch.nn.functional.pad(torch.nn.functional.pad(far, (1, 0), value=self.end), (0, 1))  # (Hq, m, N + 2)
        index = torch.arange(first - self.end, first - self.end + far.shape[1], device=far.device)
        return self._look_up(self.scaled, far + index[:, None]).permute(2, 0, 1, 3, 4)
