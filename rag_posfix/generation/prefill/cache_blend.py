"""CacheBlend prefill: passages are encoded independently, moved to their positions, and partly recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.cache_blend import SelectedAttention, deviation, first_tokens, most_deviating
from rag_posfix.attention.windows import window_positions, windows_of
from rag_posfix.errors import GenerationError
from rag_posfix.generation.model.kv_cache import GrowingCache
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, run_model
from rag_posfix.generation.prefill.encode_segments import concatenate_kv
from rag_posfix.generation.prefill.kv_lookup import KVLookup
from rag_posfix.generation.prefill.per_passage import encode_passages
from rag_posfix.generation.prefill.prefilled import PrefilledGroup, prefilled_group
from rag_posfix.generation.prefill.resolved_row import ResolvedRow
from rag_posfix.patching.forward_context import ForwardContext, Observer, Overrides
from rag_posfix.patching.rerotate import rerotate
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Blend


def prefill_blended(
    loaded: LoadedModel, layout: Layout, row: ResolvedRow, blend: Blend, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Encode or find passages, move them to their positions, recompute a fraction of their tokens, read the suffix.

    Cost with everything found: the first layers of the whole prompt, a fraction of it in all layers, the suffix.
    """
    alone = replace(row, positions=window_positions(layout, windows_of(layout, None)))
    states, cached = encode_passages(loaded, layout, [alone], kv_lookup)
    batch = _moved(loaded, row, states)
    chosen = _tokens_to_recompute(loaded, row, batch, blend)
    if len(chosen):
        _recompute(loaded, row, batch, chosen)
    start, observer = row.layout.suffix.start, Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    logits = batch.forward(ids, row.positions[:, start:], 1, observer)
    return prefilled_group(batch, logits, layout, [row], observer, max(0, cached - len(chosen)))


def _moved(loaded: LoadedModel, row: ResolvedRow, states: dict[tuple[int, float], Tensor]) -> SequenceBatch:
    """Return a batch that holds prefix and passages, keys rotated to their positions in the prompt."""
    first = len(row.layout.prefix)
    found = [states[-1, 0.0]] if first else []
    for passage, span in row.passage_spans:
        if len(span):
            keys, values = states[passage, float(first)]
            found.append(torch.stack((rerotate(loaded.model, loaded.spec, keys, span.start - first), values)))
    length = row.layout.suffix.start
    return concatenate_kv(loaded, [found], [row.positions[:, :length]], len(row.layout.suffix), row.overrides)


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
    """The layers that were asked for are computed."""


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
    """A cache whose update replaces some of the tokens that it holds."""

    def __init__(self, held: GrowingCache, chosen: Tensor) -> None:
        super().__init__(0)
        self.layers = held.layers
        self._chosen = chosen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Replace the chosen tokens; return all."""
        layer = self.layers[layer_idx]
        layer.keys[:, :, self._chosen] = key_states
        layer.values[:, :, self._chosen] = value_states
        return layer.keys, layer.values


def _recompute(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch, chosen: Tensor) -> None:
    """Replace keys and values of some tokens by what they are when they see all tokens before them."""
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
