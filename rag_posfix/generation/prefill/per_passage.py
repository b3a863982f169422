"""Reads a prompt whose passages do not attend to each other: each is found in a store, or encoded in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.encode import Stretch, encode, join
from rag_posfix.generation.prefill.kv_reuse import Reuse, Wanted
from rag_posfix.generation.prefill.resolved_row import PrefilledGroup, Spelled, group_of, logits_to_keep
from rag_posfix.patching.call import Edits, Observer
from rag_posfix.plan.layout import Layout, Span

__all__ = ["encode_passages", "joinable", "read_by_passage"]


def joinable(rows: Sequence[Spelled]) -> bool:
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


def read_by_passage(
    loaded: LoadedModel, layout: Layout, rows: Sequence[Spelled], score_question: bool, reuse: Reuse | None
) -> PrefilledGroup:
    """Read prefix and passages once, join them per row, and read the suffix in all rows together."""
    states, cached = encode_passages(loaded, layout, rows, reuse)
    suffix, first = layout.tokens(layout.suffix), rows[0].edits
    batch = join(
        loaded,
        [[states[key] for key in _keys_of(row)] for row in rows],
        [row.positions[:, : row.layout.suffix.start] for row in rows],
        len(suffix),
        replace(_apart(rows), attend=first.attend),
    )
    ids = torch.tensor([suffix] * len(rows), device=loaded.device)
    positions = torch.cat([row.positions[:, row.layout.suffix.slice] for row in rows])
    observer = Observer()
    logits = batch.forward(ids, positions, logits_to_keep(layout, score_question), observer)
    return group_of(batch, logits, layout, rows, observer, cached)


_Key = tuple[int, float]
"""A passage and its first position; the prefix is passage -1."""


def encode_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[Spelled], reuse: Reuse | None
) -> tuple[dict[_Key, Tensor], int]:
    """Return keys and values of the prefix and of every passage that a row holds, and how many tokens were found.

    Cost: one forward pass over the prefix and one, or few, over all missing passages. New ones are kept in the store.
    """
    edits, first = _apart(rows), rows[0]
    wanted = {_PREFIX: _stretch(layout, layout.prefix, first.positions[0, layout.prefix.slice])}
    for row in rows:
        for passage, span in row.placed:
            at = row.positions[0, span.slice]
            if len(span):
                wanted.setdefault((passage, float(at[0])), _stretch(layout, layout.passages[passage], at))
    prefix = wanted.pop(_PREFIX)
    if not len(prefix):
        return _find_or_encode(loaded, layout, wanted, None, edits, reuse)
    states, cached = _find_or_encode(loaded, layout, {_PREFIX: prefix}, None, edits, reuse)
    more, found = _find_or_encode(loaded, layout, wanted, (prefix, states[_PREFIX]), edits, reuse)
    return {**states, **more}, cached + found


_PREFIX: _Key = (-1, 0.0)


def _find_or_encode(
    loaded: LoadedModel,
    layout: Layout,
    wanted: dict[_Key, Stretch],
    prefix: tuple[Stretch, Tensor] | None,
    edits: Edits,
    reuse: Reuse | None,
) -> tuple[dict[_Key, Tensor], int]:
    asked = {
        key: Wanted(
            stretch, before=() if prefix is None else (prefix[0],), tags=() if key[0] < 0 else (layout.keys[key[0]],)
        )
        for key, stretch in wanted.items()
    }
    found: list[Tensor | None] = [None] * len(asked)
    if reuse is not None and asked:
        found = reuse.find(loaded, reuse.apart(edits), list(asked.values()))
    states = {key: one for key, one in zip(asked, found, strict=True) if one is not None}
    cached = sum(len(wanted[key]) for key in states)
    missing = [key for key in asked if key not in states]
    encoded = encode(loaded, [wanted[key] for key in missing], prefix, edits)
    states.update(zip(missing, encoded, strict=True))
    if reuse is not None:
        reuse.keep(reuse.apart(edits), [(asked[key], states[key]) for key in missing])
    return states, cached


def _apart(rows: Sequence[Spelled]) -> Edits:
    """Return what passages are encoded with: neither mask nor attention reach into a passage that is read alone."""
    return replace(rows[0].edits, mask=None, attend=None)


def _keys_of(row: Spelled) -> list[_Key]:
    placed = [(passage, float(row.positions[0, span.start])) for passage, span in row.placed if len(span)]
    return [_PREFIX, *placed] if len(row.layout.prefix) else placed


def _stretch(layout: Layout, span: Span, positions: Tensor) -> Stretch:
    return Stretch(layout.tokens(span), positions)
