"""Prefill of prompts whose passages are encoded independently, as they are or with tokens recomputed (CacheBlend)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.cache_blend import SelectedAttention, deviation, first_tokens, most_deviating
from rag_posfix.attention.masks import window_positions, windows_of
from rag_posfix.caching.kv.entry import EncodingKey
from rag_posfix.errors import GenerationError
from rag_posfix.generation.model.kv_cache import GrowingCache
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, run_model
from rag_posfix.generation.prefill.rows import (
    PrefilledGroup,
    ResolvedRow,
    logits_to_keep,
    prefilled_group,
    read_question,
)
from rag_posfix.generation.prefill.segments import (
    KVLookup,
    KVRequest,
    Segment,
    concatenate_kv,
    copy_rows,
    encode_segments,
)
from rag_posfix.patching.forward_context import ForwardContext, Observer, Overrides
from rag_posfix.patching.rotation import rerotate
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import Blend


def can_share_batch(rows: Sequence[ResolvedRow]) -> bool:
    """Return whether passages may be encoded independently of the question, and the rows read in one batch."""
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
    """Read prefix and passages once, concatenate them per row, and read the suffix in all rows together.

    With ``kv_lookup``, earlier turns in the suffix are read in passes of their own, to be found again in later turns.
    """
    kv, cached = encode_passages(loaded, layout, rows, kv_lookup)
    context = [[kv[key] for key in _keys_of(row)] for row in rows]
    overrides = replace(_encoding_overrides(rows), attend=rows[0].overrides.attend)
    turns: list[_EarlierTurn] = []
    found: list[list[Tensor]] = []
    if kv_lookup is not None and layout.turn_starts and overrides.attend is None:
        encoding = kv_lookup.history_encoding(overrides, len(rows), max(row.layout.suffix.start for row in rows))
        turns = _earlier_turns(layout, rows)
        found = _find_turns(loaded, turns, encoding, kv_lookup)
    start = layout.suffix.start
    read = turns[len(found) - 1].span.stop if found else start
    batch = concatenate_kv(
        loaded,
        [[*segments, *(turn[index] for turn in found)] for index, segments in enumerate(context)],
        [row.positions[:, : row.layout.suffix.start + read - start] for row in rows],
        len(layout.token_ids) - read,
        overrides,
    )
    for turn in turns[len(found) :]:
        before = batch.length
        ids = torch.tensor([layout.tokens(turn.span)] * len(rows), device=loaded.device)
        batch.forward(ids, _positions_of(layout, rows, turn.span), 1, ends_prompt=False)
        if kv_lookup is not None:
            copies = copy_rows(batch, before, [len(turn.span)] * len(rows))
            kv_lookup.add(encoding, list(zip(turn.requests, copies, strict=True)))
    asked = Span(turns[-1].span.stop if turns else start, len(layout.token_ids))
    ids = torch.tensor([layout.tokens(asked)] * len(rows), device=loaded.device)
    observer = Observer()
    keep, positions = logits_to_keep(layout, score_question), _positions_of(layout, rows, asked)
    scores = read_question(batch, ids, positions, layout, keep, observer, in_parts=overrides.attend is None)
    return prefilled_group(batch, scores, layout, rows, observer, cached + read - start)


@dataclass(frozen=True, slots=True, eq=False)
class _EarlierTurn:
    """An earlier turn of the conversation, answer included: its tokens in the prompt, and what each row needs."""

    span: Span
    requests: tuple[KVRequest, ...]


def _earlier_turns(layout: Layout, rows: Sequence[ResolvedRow]) -> list[_EarlierTurn]:
    """Return the earlier turns in the suffix; the question is behind them."""
    turns = []
    for start, stop in itertools.pairwise((layout.suffix.start, *layout.turn_starts)):
        requests = []
        for row in rows:
            shift = row.layout.suffix.start - layout.suffix.start
            tokens, positions = row.layout.token_ids, row.positions[0]
            before = Segment(tokens[: start + shift], positions[: start + shift])
            segment = Segment(tokens[start + shift : stop + shift], positions[start + shift : stop + shift])
            requests.append(KVRequest(segment, (before,), row.layout.keys, is_history=True))
        turns.append(_EarlierTurn(Span(start, stop), tuple(requests)))
    return turns


def _find_turns(
    loaded: LoadedModel, turns: Sequence[_EarlierTurn], encoding: EncodingKey, kv_lookup: KVLookup
) -> list[list[Tensor]]:
    """Return the keys and values in each row of the first turns that are stored for all rows."""
    entries = iter(kv_lookup.find(loaded, encoding, [request for turn in turns for request in turn.requests]))
    found: list[list[Tensor]] = []
    for turn in turns:
        held = [kv for _, kv in zip(turn.requests, entries, strict=False) if kv is not None]
        if len(held) < len(turn.requests):
            break
        found.append(held)
    return found


def _positions_of(layout: Layout, rows: Sequence[ResolvedRow], span: Span) -> Tensor:
    """Return the positions in each row of a span of the suffix, (R, T)."""
    shifts = [row.layout.suffix.start - layout.suffix.start for row in rows]
    return torch.cat([row.positions[:, span.shifted(by).slice] for row, by in zip(rows, shifts, strict=True)])


_Key = tuple[int, float]
"""A passage and its first position; the prefix is passage -1."""

_PREFIX: _Key = (-1, 0.0)


def encode_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup | None
) -> tuple[dict[_Key, Tensor], int]:
    """Return keys and values of the prefix and of every passage of a row, and the number of cached tokens.

    Cost: one forward pass over the prefix and one, or few, over all missing passages. New ones are added to the store.
    """
    overrides = _encoding_overrides(rows)
    prefix, needed = _segments_of(layout, rows)
    if not len(prefix):
        return _find_or_encode(loaded, layout, needed, None, overrides, kv_lookup)
    kv, cached = _find_or_encode(loaded, layout, {_PREFIX: prefix}, None, overrides, kv_lookup)
    passage_kv, n_cached = _find_or_encode(loaded, layout, needed, (prefix, kv[_PREFIX]), overrides, kv_lookup)
    return {**kv, **passage_kv}, cached + n_cached


def _segments_of(layout: Layout, rows: Sequence[ResolvedRow]) -> tuple[Segment, dict[_Key, Segment]]:
    """Return the prefix, and every passage of a row at each of its positions."""
    needed: dict[_Key, Segment] = {}
    for row in rows:
        for passage, span in row.passage_spans:
            positions = row.positions[0, span.slice]
            if len(span):
                tokens = layout.tokens(layout.passages[passage])
                needed.setdefault((passage, float(positions[0])), Segment(tokens, positions))
    return Segment(layout.tokens(layout.prefix), rows[0].positions[0, layout.prefix.slice]), needed


def cached_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup
) -> tuple[bool, ...]:
    """Return whether the prefix, and each passage at all its positions, is stored."""
    encoding = kv_lookup.independent_encoding(_encoding_overrides(rows))
    prefix, needed = _segments_of(layout, rows)
    before = (prefix,) if len(prefix) else ()
    requests = [*(KVRequest(prefix) for _ in before), *(KVRequest(segment, before) for segment in needed.values())]
    entries = kv_lookup.find(loaded, encoding, requests)
    keys = [*([_PREFIX] if before else ()), *needed]
    missing = {key[0] for key, entry in zip(keys, entries, strict=True) if entry is None}
    return tuple(index not in missing for index in range(-1, layout.n_passages))


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
    entries: list[Tensor | None] = [None] * len(requests)
    if kv_lookup is not None and requests:
        entries = kv_lookup.find(loaded, kv_lookup.independent_encoding(overrides), list(requests.values()))
    kv = {key: entry for key, entry in zip(requests, entries, strict=True) if entry is not None}
    cached = sum(len(needed[key]) for key in kv)
    missing = [key for key in requests if key not in kv]
    encoded = encode_segments(loaded, [needed[key] for key in missing], prefix, overrides)
    kv.update(zip(missing, encoded, strict=True))
    if kv_lookup is not None:
        kv_lookup.add(kv_lookup.independent_encoding(overrides), [(requests[key], kv[key]) for key in missing])
    return kv, cached


def _encoding_overrides(rows: Sequence[ResolvedRow]) -> Overrides:
    """Return what passages are encoded with: mask and attention do not reach into an independently encoded passage."""
    return replace(rows[0].overrides, mask=None, attend=None)


def _keys_of(row: ResolvedRow) -> list[_Key]:
    keys = [(passage, float(row.positions[0, span.start])) for passage, span in row.passage_spans if len(span)]
    return [_PREFIX, *keys] if len(row.layout.prefix) else keys


def prefill_blended(
    loaded: LoadedModel, layout: Layout, row: ResolvedRow, blend: Blend, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Encode or find passages, move them to their positions, recompute a fraction of their tokens, read the suffix.

    Cost with all segments cached: the first layers of the whole prompt, a fraction of it in all layers, the suffix.
    """
    kv, cached = encode_passages(loaded, layout, [independent_row(layout, row)], kv_lookup)
    batch = _move_passages(loaded, row, kv)
    chosen = _tokens_to_recompute(loaded, row, batch, blend)
    if len(chosen):
        _recompute(loaded, row, batch, chosen)
    start, observer = row.layout.suffix.start, Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    read = read_question(batch, ids, row.positions[:, start:], layout, 1, observer)
    return prefilled_group(batch, read, layout, [row], observer, max(0, cached - len(chosen)))


def independent_row(layout: Layout, row: ResolvedRow) -> ResolvedRow:
    """Return the row with every passage at the positions right after the prefix."""
    return replace(row, positions=window_positions(layout, windows_of(layout, None)))


def _move_passages(loaded: LoadedModel, row: ResolvedRow, kv: dict[tuple[int, float], Tensor]) -> SequenceBatch:
    """Return a batch that holds prefix and passages, keys rotated to their positions in the prompt."""
    first = len(row.layout.prefix)
    segments = [kv[-1, 0.0]] if first else []
    for passage, span in row.passage_spans:
        if len(span):
            keys, values = kv[passage, float(first)]
            segments.append(torch.stack((rerotate(loaded.spec, keys, span.start - first), values)))
    length = row.layout.suffix.start
    return concatenate_kv(loaded, [segments], [row.positions[:, :length]], len(row.layout.suffix), row.overrides)


def _tokens_to_recompute(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch, blend: Blend) -> Tensor:
    """Return which tokens are recomputed, (n,) int64; the first layers of all tokens are recomputed on the way."""
    if blend.by == "first":
        spans = [(span.start, span.stop) for _, span in row.passage_spans]
        return first_tokens(spans, blend.fraction).to(loaded.device)
    fresh = _first_layers(loaded, row, blend.layers)
    last = blend.layers - 1
    start = len(row.layout.prefix)
    deviations = deviation(fresh.layers[last].values, batch.cache.layers[last].values)
    chosen = most_deviating(loaded.spec.ranks.mean(deviations), start, blend.fraction)
    for old, new in zip(batch.cache.layers[: blend.layers], fresh.layers, strict=False):
        old.keys.copy_(new.keys)
        old.values.copy_(new.values)
    return chosen


class _EnoughLayers(Exception):
    """The first layers are computed."""


def _first_layers(loaded: LoadedModel, row: ResolvedRow, count: int) -> GrowingCache:
    """Return keys and values of prefix and passages in the first ``count`` layers, as the whole prompt has them."""
    length = row.layout.suffix.start
    cache = GrowingCache(loaded.spec.shape.n_layers)

    def stop(layer: int, _: Tensor) -> None:
        if layer == count:
            raise _EnoughLayers

    positions = row.positions[:, :length].to(loaded.device)
    context = ForwardContext(positions=positions, spec=loaded.spec, on_hidden_states=stop, starts=(0,))
    ids = torch.tensor([row.layout.token_ids[:length]], device=loaded.device)
    try:
        run_model(loaded, context, cache, ids, positions.long(), 1)
    except _EnoughLayers:
        return cache
    if count < loaded.spec.shape.n_layers:
        raise GenerationError("the model did not stop at the layer that it was asked to; please report this")
    return cache


class _OverwritingCache(GrowingCache):
    """A cache whose update replaces the tokens ``chosen``."""

    def __init__(self, held: GrowingCache, chosen: Tensor) -> None:
        super().__init__(0)
        self.layers = held.layers
        self._chosen = chosen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        layer.keys[:, :, self._chosen] = key_states
        layer.values[:, :, self._chosen] = value_states
        return layer.keys, layer.values


def _recompute(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch, chosen: Tensor) -> None:
    """Replace keys and values of tokens ``chosen`` by their values after all tokens before them."""
    context = ForwardContext(
        Overrides(attend=SelectedAttention(chosen)),
        batch.positions,
        loaded.spec,
        prompt_length=batch.length,
        starts=(0,),
    )
    ids = torch.tensor([row.layout.token_ids], device=loaded.device)[:, chosen]
    run_model(
        loaded,
        context,
        _OverwritingCache(batch.cache, chosen),
        ids,
        row.positions.to(loaded.device)[:, chosen].long(),
        1,
    )
