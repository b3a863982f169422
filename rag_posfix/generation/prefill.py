"""Reads a prompt under a plan: row by row as it stands, or passage by passage where passages are independent.

Knows plans, layouts and rows; knows no method by name, no text and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from rag_posfix.attention.plan import Plan, RowPlan
from rag_posfix.attention.shape import Capability
from rag_posfix.attention.spans import Layout, Span
from rag_posfix.generation.forward import LoadedModel, Rows, new_cache
from rag_posfix.patching.call import Edits, Observer

__all__ = ["PrefilledGroup", "prefill", "read_on"]

BATCH_TOKENS = 8192
"""Passages are encoded together up to this many padded tokens: enough to fill the processor, little memory."""

LayerKV: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of a stretch of tokens, one pair per layer, each (1, Hkv, T, D)."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledGroup:
    """Rows that were read, and what they say of the next token.

    Attributes:
        rows: The rows, ready to decode.
        logits: (R, K, V): the last is that of the next token; the others are those of the question, if asked for.
        question: (R,) mean log-probability of the question's tokens, zeros if not asked for.
        mass: (R, N) attention of the last token to each passage of the prompt, averaged over layers and heads.
        attention: (R, N) the same as shares of the attention to passages; rows sum to 1 or are 0.
    """

    rows: Rows
    logits: Tensor
    question: Tensor
    mass: Tensor
    attention: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A row of a plan: the layout of what it sees, its positions spelled out, and what it asks of the model."""

    layout: Layout
    passages: tuple[int, ...]
    positions: Tensor
    edits: Edits


def prefill(loaded: LoadedModel, layout: Layout, plan: Plan) -> list[PrefilledGroup]:
    """Read the prompt and return groups of rows; the rows of all groups, in order, are the plan's rows.

    Cost: plans with independent passages encode prefix and passages once, in batches, and join them; other plans read
    each row as one sequence.
    """
    rows = [_spell_out(row, layout, loaded.device) for row in plan.rows]
    joinable = Capability.FULL_CACHE in loaded.spec.shape.capabilities and _joinable(rows)
    if plan.independent_passages and layout.n_passages and joinable:
        return [_read_by_passage(loaded, layout, rows, plan.score_question)]
    return [_read_whole(loaded, layout, row, plan.score_question) for row in rows]


def read_on(loaded: LoadedModel, layout: Layout, row: RowPlan, before: Rows) -> PrefilledGroup:
    """Read what is left of a prompt as ``row`` asks, after rows that hold its first tokens."""
    spelled, start = _spell_out(row, layout, loaded.device), before.length
    before.edits = spelled.edits
    observer = Observer()
    ids = torch.tensor([spelled.layout.token_ids[start:]], device=loaded.device)
    logits = before.forward(ids, spelled.positions[:, start:], 1, observer)
    return _group(before, logits, layout, [spelled], observer)


def _joinable(rows: Sequence[_Row]) -> bool:
    """Return whether the rows' passages may be encoded apart from the question, and the rows share a batch."""
    first = rows[0].edits
    return all(
        row.edits.head_scale is None
        and row.edits.hidden_scale is None
        and row.edits.rope_base_factor == first.rope_base_factor
        and row.edits.layer_scale == first.layer_scale
        and (row.edits.attend is None or len(rows) == 1)
        for row in rows
    )


def _spell_out(row: RowPlan, layout: Layout, device: torch.device) -> _Row:
    passages = tuple(range(layout.n_passages)) if row.passages is None else row.passages
    seen = layout if row.passages is None else layout.select(passages)
    positions = row.positions
    if positions is None:
        positions = torch.arange(len(seen.token_ids), dtype=torch.float32)[None]
    edits = Edits(
        mask=row.mask,
        rope_base_factor=row.rope_base_factor,
        layer_scale=None if row.layer_scale is None else tuple(row.layer_scale.tolist()),
        head_scale=row.head_scale,
        hidden_scale=row.hidden_scale,
        attend=row.attend,
    )
    return _Row(seen, passages, positions.to(device), edits)


def _read_whole(loaded: LoadedModel, layout: Layout, row: _Row, score_question: bool) -> PrefilledGroup:
    """Read one row as one sequence."""
    rows = Rows(loaded, new_cache(loaded), row.positions[:, :0], edits=row.edits)
    observer = Observer()
    ids = torch.tensor([row.layout.token_ids], device=loaded.device)
    logits = rows.forward(ids, row.positions, _logits_to_keep(row.layout, score_question), observer)
    return _group(rows, logits, layout, [row], observer)


def _read_by_passage(loaded: LoadedModel, layout: Layout, rows: list[_Row], score_question: bool) -> PrefilledGroup:
    """Encode prefix and passages once, join them per row, and read the suffix in all rows together."""
    apart = replace(rows[0].edits, mask=None, attend=None)  # what passages are encoded with
    start = [layout.tokens(layout.prefix)]
    prefix = _encode(loaded, start, [rows[0].positions[0, layout.prefix.slice]], None, apart)[0]
    jobs: dict[tuple[int, float], int] = {}  # (passage, first position) -> its place in `encoded`
    ids: list[Sequence[int]] = []
    starts: list[Tensor] = []
    for row in rows:
        for passage, span in _passages_of(row):
            at = row.positions[0, span.slice]
            if (passage, float(at[0])) not in jobs:
                jobs[passage, float(at[0])] = len(ids)
                ids.append(layout.tokens(layout.passages[passage]))
                starts.append(at)
    encoded = _encode(loaded, ids, starts, prefix, apart)
    stretches = [
        [prefix, *(encoded[jobs[p, float(r.positions[0, s.start])]] for p, s in _passages_of(r))] for r in rows
    ]
    batch = _join(loaded, stretches, [r.positions[:, : r.layout.suffix.start] for r in rows])
    batch.edits = replace(apart, attend=rows[0].edits.attend)
    suffix = torch.tensor([layout.tokens(layout.suffix)] * len(rows), device=loaded.device)
    positions = torch.cat([row.positions[:, row.layout.suffix.slice] for row in rows])
    observer = Observer()
    logits = batch.forward(suffix, positions, _logits_to_keep(layout, score_question), observer)
    return _group(batch, logits, layout, rows, observer)


def _passages_of(row: _Row) -> list[tuple[int, Span]]:
    return list(zip(row.passages, row.layout.passages, strict=True))


def _encode(
    loaded: LoadedModel,
    ids: Sequence[Sequence[int]],
    positions: Sequence[Tensor],
    prefix: LayerKV | None,
    edits: Edits,
) -> list[LayerKV]:
    """Return the keys and values of each sequence read after ``prefix`` alone; sequences do not see each other.

    Sequences of similar length share a batch. Padding stands at the end, where a causal mask hides it.
    """
    result: list[LayerKV] = [[] for _ in ids]
    by_length = sorted((i for i in range(len(ids)) if len(ids[i])), key=lambda i: len(ids[i]))
    while by_length:
        longest = len(ids[by_length[-1]])
        count = max(1, BATCH_TOKENS // longest)
        batch, by_length = by_length[-count:], by_length[:-count]
        before = prefix[0][0].shape[2] if prefix else 0
        cache = new_cache(loaded)
        for layer, (keys, values) in enumerate(prefix or []):
            cache.update(keys.expand(len(batch), -1, -1, -1), values.expand(len(batch), -1, -1, -1), layer)
        tokens = torch.zeros((len(batch), longest), dtype=torch.long, device=loaded.device)
        at = torch.zeros((len(batch), longest), device=loaded.device)
        for row, i in enumerate(batch):
            tokens[row, : len(ids[i])] = torch.tensor(ids[i], device=loaded.device)
            at[row, : len(ids[i])] = positions[i]
            at[row, len(ids[i]) :] = positions[i][-1]
        rows = Rows(loaded, cache, at[:, :0], edits=edits, length=before)
        rows.forward(tokens, at, keep=1)
        for row, i in enumerate(batch):
            span = slice(before, before + len(ids[i]))
            result[i] = [(_cut(layer.keys, row, span), _cut(layer.values, row, span)) for layer in cache.layers]
    return result


def _cut(states: Tensor, row: int, span: slice) -> Tensor:
    return states[row : row + 1, :, span]


def _join(loaded: LoadedModel, stretches: list[list[LayerKV]], positions: list[Tensor]) -> Rows:
    """Lay stretches of keys and values end to end in each row; shorter rows are padded in front of their suffix."""
    lengths = [p.shape[1] for p in positions]
    longest = max(lengths)
    cache = new_cache(loaded)
    some = next(stretch for row in stretches for stretch in row if stretch)
    for layer in range(len(some)):
        empty = tuple(part[:, :, :0] for part in some[layer])  # a row may have nothing before its suffix
        joined = [
            tuple(torch.cat([empty[part], *(s[layer][part] for s in row if s)], dim=2) for part in (0, 1))
            for row in stretches
        ]
        keys, values = (torch.cat([_pad(row[part], longest) for row in joined]) for part in (0, 1))
        cache.update(keys, values, layer)
    padding = None
    if min(lengths) < longest:
        padding = (
            torch.arange(longest, device=loaded.device)[None] < torch.tensor(lengths, device=loaded.device)[:, None]
        )
    filled = torch.cat([torch.nn.functional.pad(p, (0, longest - p.shape[1])) for p in positions])
    return Rows(loaded, cache, filled, padding=padding, length=longest)


def _pad(states: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, length - states.shape[2]))


def _logits_to_keep(layout: Layout, score_question: bool) -> int:
    """Return how many trailing logits are needed: those that predict the question's tokens, or the last alone."""
    if not score_question or layout.question.start == 0:
        return 1
    return len(layout.token_ids) - layout.question.start + 1


def _group(
    rows: Rows,
    logits: Tensor,
    layout: Layout,
    read: list[_Row],
    observer: Observer,
) -> PrefilledGroup:
    question = torch.zeros(len(read), device=logits.device)
    if logits.shape[1] > 1:
        target = torch.tensor(layout.tokens(layout.question), device=logits.device)
        for r in range(len(read)):  # row by row: (question, V) in float32 is large
            said = logits[r, : len(target)].float().log_softmax(dim=-1)
            question[r] = said.gather(1, target[:, None]).mean() if len(target) else 0.0
    mass = torch.zeros((len(read), layout.n_passages), device=logits.device)
    attended = observer.mean()
    if attended is not None:
        attended = rows.loaded.spec.ranks.mean(attended)
    for r, row in enumerate(read):
        for passage, span in _passages_of(row):
            mass[r, passage] = attended[r, span.slice].sum() if attended is not None else 0.0
    total = mass.sum(dim=1, keepdim=True)
    return PrefilledGroup(rows, logits, question, mass, mass / total.where(total > 0, 1.0))
