"""PINE: attention between documents that orders them by importance for each query; no T x T tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from rag_posfix.attention.blockwise import attend_with_lse
from rag_posfix.attention.rope import quarter_turn, rotate_by_phases
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, Rotated


def document_importance(query: Tensor, key: Tensor, members: Tensor, scaling: float) -> Tensor:
    """Return how much attention without positions each query pays to each document, in all.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: s(n) = softmax_n(q^T k_n scaling); sum_{n in j} s(n): attention whose values say which document a token
        belongs to.

    Cost: one fused call for each D documents; no score is held. Sums are rounded to the dtype of ``query``; in float16
        those below 6e-8 are 0.

    Shapes:
        query: (B, Hq, R, D) and key: (B, Hkv, S, D), unrotated. members: (B, S, N), 1 where a token belongs to a
        document. returns: (B, Hq, R, N) in the dtype of ``query``.
    """
    n_documents, size = members.shape[2], key.shape[3]
    padded = functional.pad(members, (0, -n_documents % size))[:, None].expand(-1, key.shape[1], -1, -1)
    pieces = [attend_with_lse(query, key, values, scaling)[0] for values in torch.split(padded, size, dim=3)]
    return torch.cat(pieces, dim=3)[..., :n_documents]


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
        members: (S, N) float32, 1 where a token belongs to document j and 0 elsewhere.
    """

    rotated: ClassVar[Rotated] = Rotated.NEITHER

    spans: tuple[slice, ...]
    lengths: Tensor
    segments: Tensor
    offsets: Tensor
    members: Tensor

    @classmethod
    def over(cls, layout: Layout) -> ImportanceOrderedAttention:
        """Return the attention over a prompt's passages."""
        spans = (layout.prefix, *layout.passages)
        lengths = torch.tensor([len(span) for span in layout.passages])
        documents = torch.arange(len(lengths))
        return cls(
            spans=tuple(span.slice for span in spans),
            lengths=lengths,
            segments=torch.repeat_interleave(torch.tensor([len(span) for span in spans])),
            offsets=torch.cat([torch.arange(len(span)) for span in spans]),
            members=(documents.repeat_interleave(lengths)[:, None] == documents).float(),
        )

    def on(self, device: torch.device) -> ImportanceOrderedAttention:
        """Return the same with its tensors on a device."""
        return replace(
            self,
            lengths=self.lengths.to(device),
            segments=self.segments.to(device),
            offsets=self.offsets.to(device),
            members=self.members.to(device),
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
        outs = [attention_pass.read_prompt()] if inputs.start == 0 else []
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
    return 2**20 if device.type == "cpu" else 2**26


class _Pass:
    """One layer's attention in one forward pass. The batch axis is left out throughout.

    ``relative_...``: rotated to the position of the token in its segment.

    The keys of prefix and documents, rotated in their segments, are kept for the tokens that follow, in the dtype of
    the cache: half as much memory again as the cache takes.
    """

    def __init__(self, plan: ImportanceOrderedAttention, inputs: AttentionInput) -> None:
        self.plan, self.inputs, self.spans, self.end = plan, inputs, plan.spans, len(plan.offsets)
        self.groups = inputs.query.shape[1] // inputs.key.shape[1]
        self.documents = slice(plan.spans[0].stop, self.end)
        self.members = plan.members.to(inputs.query.dtype)
        self.table = self._phases_of_positions(inputs.key.shape[2])
        if inputs.start == 0 or inputs.layer not in inputs.kept:
            phases = self.table[:, plan.offsets]  # (1 | Hkv, P + S, pairs)
            inputs.kept[inputs.layer] = rotate_by_phases(inputs.key[0, :, : self.end].to(inputs.query.dtype), phases)
        self.kept_key = inputs.kept[inputs.layer]  # (Hkv, P + S, D)
        if inputs.start == 0:
            phases = phases if len(phases) == 1 else phases.repeat_interleave(self.groups, dim=0)
            self.relative_query = rotate_by_phases(inputs.query[0, :, : self.end], phases)
            n_key_heads, size = self.kept_key.shape[0], self.kept_key.shape[2]
            most = max(1, most_numbers(inputs.query.device) // (self.groups * self.end * size))
            self.batches = list(batches(self.spans[1:], max(1, most // n_key_heads)))
            self.key_heads = [slice(head, min(head + most, n_key_heads)) for head in range(0, n_key_heads, most)]

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

    @property
    def n_pairs(self) -> int:
        """Pairs of channels that rotate."""
        return self.table.shape[-1]

    def _look_up(self, positions: Tensor) -> Tensor:
        """Return the phases of positions (Hq, ..), (Hq, .., pairs) complex."""
        if self.table.shape[0] == 1:
            return self.table[0][positions]
        heads = torch.arange(len(positions), device=positions.device) // self.groups
        return self.table[heads.view(-1, *(1 for _ in positions.shape[1:])), positions]

    def read_prompt(self) -> Tensor:
        """Return the output of prefix and documents, (Hq, P + S, D).

        Queries keep their own position; all segments before them are moved to their positions relative to the
        document's beginning.
        """
        inputs, span = self.inputs, self.spans[0]
        out = torch.empty_like(self.relative_query)
        if span.start < span.stop:
            query, key, value = (
                self.relative_query[None, :, span],
                self.kept_key[None, :, span],
                inputs.value[:, :, span],
            )
            out[:, span] = attend_with_lse(query, key, value, inputs.scaling, causal=True)[0][0]
        # Moved keys differ between the heads of a group, and the kernels need as many heads of values.
        value = repeat_twice(
            inputs.value[0, :, : self.end].repeat_interleave(self.groups, dim=0)
        )  # (Hq, 2 (P + S), D)
        for batch, heads, key in self._moved_keys():
            query, seen = self._of_each(self.relative_query[heads], batch), self._window(value[heads], batch)
            read, _ = attend_with_lse(query, key, seen.transpose(0, 1), inputs.scaling, causal=True)
            self._of_each(out[heads], batch).copy_(read)
        return out

    def _of_each(self, states: Tensor, batch: _Batch) -> Tensor:
        """Return the tokens of each document of a batch, (count, Hq, n, D)."""
        span = slice(batch.stop - batch.length, batch.stop + (batch.count - 1) * batch.length)
        return torch.unflatten(states[:, span], 1, (batch.count, batch.length)).transpose(0, 1)

    def _window(self, doubled: Tensor, batch: _Batch) -> Tensor:
        """Return what each document of a batch sees of prefix and documents: those after it, .., itself; a view."""
        return windows(doubled, batch.stop, batch, self.end)

    def _moved_keys(self) -> Iterator[tuple[_Batch, slice, Tensor]]:
        """Yield batches of documents, query heads, and the keys that their queries see, (count, heads, P + S, D).

        In the order of a circle: those after the document, the prefix, those before it, and itself.
        """
        cos, sin = self._moves()  # (Hq, N (1 + N), D)
        n_still = self.kept_key.shape[2] - 2 * self.n_pairs
        turned = functional.pad(quarter_turn(self.kept_key[..., : 2 * self.n_pairs]), (0, n_still))
        key, turned = repeat_twice(self.kept_key), repeat_twice(turned)
        segments, n_segments = repeat_twice(self.plan.segments, 0), len(self.spans)
        for batch, key_heads in itertools.product(self.batches, self.key_heads):
            heads = slice(key_heads.start * self.groups, key_heads.stop * self.groups)
            rows = torch.arange(batch.count, device=segments.device)[:, None] * n_segments
            index = (rows + self._window(segments, batch)).flatten()  # (count (P + S),)
            turns = (x[heads].narrow(1, batch.first * n_segments, batch.count * n_segments) for x in (cos, sin))
            shape = (-1, self.groups, batch.count, self.end, key.shape[2])
            moved, by_sin = (x.index_select(1, index).view(shape) for x in turns)
            moved.mul_(self._window(key[key_heads], batch)[:, None])
            moved.addcmul_(by_sin, self._window(turned[key_heads], batch)[:, None])
            yield batch, heads, moved.flatten(0, 1).transpose(0, 1)

    def _moves(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin of what moves each segment for each document's queries, (Hq, N (1 + N), D) each.

        Positions count from the document's own beginning, which is 0; all other segments are before it.
        """
        back = distances(self._between_documents(), self.plan.lengths)  # (N, Hq, N)
        back.diagonal(dim1=0, dim2=2).zero_()
        prefix = (self.end - self.plan.lengths)[:, None, None].expand(-1, back.shape[1], 1)
        back = torch.cat((prefix, back), dim=-1).transpose(0, 1).flatten(1)  # (Hq, N (1 + N))
        phases = self._look_up(back).conj_physical()
        phases = phases / phases.abs()  # scaling is in the segment-relative rotation
        n_still = self.kept_key.shape[2] - 2 * self.n_pairs
        parts = ((phases.real, 1.0), (phases.imag, 0.0))  # channels that do not rotate: cos 1, sin 0
        cos, sin = (functional.pad(torch.cat((x, x), dim=-1), (0, n_still), value=still) for x, still in parts)
        return cos.to(self.kept_key.dtype), sin.to(self.kept_key.dtype)

    def _between_documents(self) -> Tensor:
        """Return how much each document matters to each in each head, (N, Hq, N); -inf for itself.

        Formula: Imp(D_i -> D_j) = sum_{m in D_i} sum_{n in D_j} s(m, n) / n_j, with ``document_importance`` over the
            tokens of all documents but D_i.
        """
        inputs, lengths, documents = self.inputs, self.plan.lengths, self.documents
        shape = (len(lengths), inputs.query.shape[1], len(lengths))
        importance = torch.zeros(shape, device=lengths.device)
        # Of two documents the other is nearest; without RoPE none is.
        if self.n_pairs and sum(span.start < span.stop for span in self.spans[1:]) > 2:
            key, members = repeat_twice(inputs.key[0, :, documents]), repeat_twice(self.members)[None]
            for batch in self.batches:
                others = batch.stop - documents.start, batch, len(self.members) - batch.length
                paid = document_importance(
                    self._of_each(inputs.query[0], batch),
                    windows(key, *others).transpose(0, 1),
                    windows(members, *others)[0],
                    inputs.scaling,
                )
                importance[batch.first : batch.first + batch.count] = paid.sum(dim=2, dtype=torch.float32)
            importance /= lengths.clamp(min=1)
        importance.diagonal(dim1=0, dim2=2).fill_(float("-inf"))
        return importance

    def read_after(self, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """Return the output of the tokens ``first`` to ``last``, (Hq, m, D), and the last one's attention, (1, Tk).

        Keys keep their position in the segment; queries are moved to their positions relative to each segment's
        beginning. Attention to each segment is merged. The second is None where it is not needed.
        """
        inputs, prefix, documents = self.inputs, self.spans[0], self.spans[1:]
        query = inputs.query[:, :, first - inputs.start : last - inputs.start]
        versions = rotate_by_phases(query[0].float(), self._turns_after(query, first)).to(query.dtype)
        after = rotate_by_phases(inputs.key[0, :, self.end : last].to(query.dtype), self.table[:, : last - self.end])
        value = inputs.value[0, :, :last]
        segments = [(versions[-1:], after[None], value[None, :, self.end :])]
        if prefix.start < prefix.stop:
            segments.append((versions[:1], self.kept_key[None, :, prefix], value[None, :, prefix]))
        for batch in batches(documents, len(documents)):
            keys, values = (self._of_each(states, batch) for states in (self.kept_key, value))
            segments.append((versions[batch.first + 1 : batch.first + 1 + batch.count], keys, values))
        outs, lses = zip(
            *(attend_with_lse(*states, inputs.scaling, causal=i == 0) for i, states in enumerate(segments)),
            strict=True,
        )
        out = (torch.cat(lses).softmax(dim=0).unsqueeze(-1) * torch.cat(outs)).sum(dim=0)
        if not inputs.needs_weights or last < inputs.key.shape[2]:
            return out, None
        lengths = [span.stop - span.start for span in self.spans]
        newest = torch.unflatten(versions[:, :, -1], 1, (-1, self.groups))  # (N + 2, Hkv, G, D)
        keys_of_segments = (*torch.split(self.kept_key, lengths, dim=1), after)
        scores = [states @ key.transpose(1, 2) for states, key in zip(newest, keys_of_segments, strict=True)]
        weights = (torch.cat(scores, dim=-1).float() * inputs.scaling).softmax(dim=-1)
        return out, weights.mean(dim=(0, 1))[None]

    def _turns_after(self, query: Tensor, first: int) -> Tensor:
        """Return what moves the queries from ``first`` on for each segment, (N + 2, Hq, m, pairs) complex.

        Shapes:
            query: (1, Hq, m, D), unrotated.
        """
        inputs, lengths = self.inputs, self.plan.lengths
        key = inputs.key[:, :, self.documents]
        paid = document_importance(query, key, self.members[None], inputs.scaling)[0]
        far = distances(paid.float() / lengths.clamp(min=1), lengths)  # (Hq, m, N)
        # The prefix begins at 0, documents ``far`` before the end of the last, what follows there.
        far = functional.pad(functional.pad(far, (1, 0), value=self.end), (0, 1))  # (Hq, m, N + 2)
        index = torch.arange(first - self.end, first - self.end + far.shape[1], device=far.device)
        return self._look_up((far + index[:, None]).permute(0, 2, 1)).transpose(0, 1)
