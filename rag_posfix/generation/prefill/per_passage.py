"""Prefill of prompts whose passages do not attend to each other: each is found in the store, or encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.encode_segments import Segment, concatenate_kv, encode_segments
from rag_posfix.generation.prefill.kv_lookup import KVLookup, KVRequest
from rag_posfix.generation.prefill.prefilled import PrefilledGroup, logits_to_keep, prefilled_group
from rag_posfix.generation.prefill.resolved_row import ResolvedRow
from rag_posfix.patching.forward_context import Observer, Overrides
from rag_posfix.plan.layout import Layout, Span


def can_share_batch(rows: Sequence[ResolvedRow]) -> bool:
    """Return whether the rows' passages may be encoded apart from the question, and the rows read in one batch."""
    first = rows[0].overrides
    return all(
        row.overrides.head_scale is None
        and row.overrides.hidden_scale is None
        and row.overrides.rope_base_factor == first.rope_base_factor
        and row.overrides.layer_scale == first.layer_scale
        and (row.overrides.attend is None or len(rows) == 1)
        for row in rows
    )


def prefill_per_passage(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], score_question: bool, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Read prefix and passages once, concatenate them per row, and read the suffix in all rows together."""
    states, cached = encode_passages(loaded, layout, rows, kv_lookup)
    suffix, first = layout.tokens(layout.suffix), rows[0].overrides
    batch = concatenate_kv(
        loaded,
        [[states[key] for key in _keys_of(row)] for row in rows],
        [row.positions[:, : row.layout.suffix.start] for row in rows],
        len(suffix),
        replace(_encoding_overrides(rows), attend=first.attend),
    )
    ids = torch.tensor([suffix] * len(rows), device=loaded.device)
    positions = torch.cat([row.positions[:, row.layout.suffix.slice] for row in rows])
    observer = Observer()
    logits = batch.forward(ids, positions, logits_to_keep(layout, score_question), observer)
    return prefilled_group(batch, logits, layout, rows, observer, cached)


_Key = tuple[int, float]
"""A passage and its first position; the prefix is passage -1."""

_PREFIX: _Key = (-1, 0.0)


def encode_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup | None
) -> tuple[dict[_Key, Tensor], int]:
    """Return keys and values of the prefix and of every passage that a row holds, and how many tokens were found.

    Cost: one forward pass over the prefix and one, or few, over all missing passages. New ones are added to the store.
    """
    overrides, first = _encoding_overrides(rows), rows[0]
    needed: dict[_Key, Segment] = {}
    for row in rows:
        for passage, span in row.passage_spans:
            at = row.positions[0, span.slice]
            if len(span):
                needed.setdefault((passage, float(at[0])), _segment(layout, layout.passages[passage], at))
    prefix = _segment(layout, layout.prefix, first.positions[0, layout.prefix.slice])
    if not len(prefix):
        return _find_or_encode(loaded, layout, needed, None, overrides, kv_lookup)
    states, cached = _find_or_encode(loaded, layout, {_PREFIX: prefix}, None, overrides, kv_lookup)
    more, found = _find_or_encode(loaded, layout, needed, (prefix, states[_PREFIX]), overrides, kv_lookup)
    return {**states, **more}, cached + found


def _find_or_encode(
    loaded: LoadedModel,
    layout: Layout,
    needed: dict[_Key, Segment],
    prefix: tuple[Segment, Tensor] | None,
    overrides: Overrides,
    kv_lookup: KVLookup | None,
) -> tuple[dict[_Key, Tensor], int]:
    before = () if prefix is None else (prefix[0],)
    requests = {
        key: KVRequest(segment, before, tags=() if key == _PREFIX else (layout.keys[key[0]],))
        for key, segment in needed.items()
    }
    found: list[Tensor | None] = [None] * len(requests)
    if kv_lookup is not None and requests:
        found = kv_lookup.find(loaded, kv_lookup.independent_part(overrides), list(requests.values()))
    states = {key: kv for key, kv in zip(requests, found, strict=True) if kv is not None}
    cached = sum(len(needed[key]) for key in states)
    missing = [key for key in requests if key not in states]
    encoded = encode_segments(loaded, [needed[key] for key in missing], prefix, overrides)
    states.update(zip(missing, encoded, strict=True))
    if kv_lookup is not None:
        kv_lookup.add(kv_lookup.independent_part(overrides), [(requests[key], states[key]) for key in missing])
    return states, cached


def _encoding_overrides(rows: Sequence[ResolvedRow]) -> Overrides:
    """Return what passages are encoded with: neither mask nor attention reach into a passage that is read alone."""
    return replace(rows[0].overrides, mask=None, attend=None)


def _keys_of(row: ResolvedRow) -> list[_Key]:
    keys = [(passage, float(row.positions[0, span.start])) for passage, span in row.passage_spans if len(span)]
    return [_PREFIX, *keys] if len(row.layout.prefix) else keys


def _segment(layout: Layout, span: Span, positions: Tensor) -> Segment:
    return Segment(layout.tokens(span), positions)
