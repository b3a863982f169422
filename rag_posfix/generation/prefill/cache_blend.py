"""Reads a prompt from passages that were read apart: moves them to their places and reads some tokens again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.cache_blend import SelectedAttention, deviation, first_tokens, most_deviating
from rag_posfix.attention.windows import window_positions, windows_of
from rag_posfix.errors import GenerationError
from rag_posfix.generation.model.kv_cache import GrowingCache
from rag_posfix.generation.model.sequence_batch import LoadedModel, Rows, run_model
from rag_posfix.generation.prefill.encode import join
from rag_posfix.generation.prefill.kv_reuse import Reuse
from rag_posfix.generation.prefill.per_passage import encode_passages
from rag_posfix.generation.prefill.resolved_row import PrefilledGroup, Spelled, group_of
from rag_posfix.patching.call import Edits, Observer, SeamCall
from rag_posfix.patching.rerotate import rerotate
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Blend

__all__ = ["read_blended"]


def read_blended(
    loaded: LoadedModel, layout: Layout, row: Spelled, blend: Blend, reuse: Reuse | None
) -> PrefilledGroup:
    """Read passages apart, or find them, place them, read a fraction of their tokens again, then the suffix.

    Cost with everything found: the first layers of the whole prompt, a fraction of it in all layers, the suffix.
    """
    apart = replace(row, positions=window_positions(layout, windows_of(layout, None)).to(loaded.device))
    states, cached = encode_passages(loaded, layout, [apart], reuse)
    rows = _placed(loaded, row, states)
    chosen = _chosen(loaded, row, rows, blend)
    if len(chosen):
        _read_again(loaded, row, rows, chosen)
    start, observer = row.layout.suffix.start, Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    logits = rows.forward(ids, row.positions[:, start:], 1, observer)
    return group_of(rows, logits, layout, [row], observer, max(0, cached - len(chosen)))


def _placed(loaded: LoadedModel, row: Spelled, states: dict[tuple[int, float], Tensor]) -> Rows:
    """Return a row that holds prefix and passages, keys moved from where they were read to where they stand."""
    first = len(row.layout.prefix)
    found = [states[-1, 0.0]] if first else []
    for passage, span in row.placed:
        if len(span):
            keys, values = states[passage, float(first)]
            found.append(torch.stack((rerotate(loaded.model, loaded.spec, keys, span.start - first), values)))
    length = row.layout.suffix.start
    return join(loaded, [found], [row.positions[:, :length]], len(row.layout.suffix), row.edits)


def _chosen(loaded: LoadedModel, row: Spelled, rows: Rows, blend: Blend) -> Tensor:
    """Return which tokens are read again, (n,) int64; the first layers of all tokens are made right on the way."""
    if blend.by == "first":
        return first_tokens([(span.start, span.stop) for _, span in row.placed], blend.fraction).to(loaded.device)
    fresh = _first_layers(loaded, row, blend.layers)
    last = blend.layers - 1
    start = len(row.layout.prefix)
    deviations = deviation(fresh.layers[last].values, rows.cache.layers[last].values)
    chosen = most_deviating(loaded.spec.ranks.mean(deviations), start, blend.fraction)
    for old, new in zip(rows.cache.layers[: blend.layers], fresh.layers, strict=False):
        old.keys.copy_(new.keys)
        old.values.copy_(new.values)
    return chosen


class _Enough(Exception):
    """The layers that were asked for are computed."""


def _first_layers(loaded: LoadedModel, row: Spelled, count: int) -> GrowingCache:
    """Return keys and values of prefix and passages in the first ``count`` layers, as the whole prompt has them."""
    length = row.layout.suffix.start
    cache = GrowingCache(loaded.spec.shape.n_layers)

    def stop(layer: int, _: Tensor) -> None:
        if layer == count:
            raise _Enough

    call = SeamCall(positions=row.positions[:, :length], spec=loaded.spec, listener=stop, starts=(0,))
    ids = torch.tensor([row.layout.token_ids[:length]], device=loaded.device)
    try:
        run_model(loaded, call, cache, ids, row.positions[:, :length].long(), 1)
    except _Enough:
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


def _read_again(loaded: LoadedModel, row: Spelled, rows: Rows, chosen: Tensor) -> None:
    """Replace keys and values of some tokens by what they are when they see all tokens before them."""
    edits = Edits(attend=SelectedAttention(chosen))
    call = SeamCall(edits, rows.positions, loaded.spec, n_prompt=rows.length, starts=(0,))
    ids = torch.tensor([row.layout.token_ids], device=loaded.device)[:, chosen]
    run_model(loaded, call, _OverwritingCache(rows.cache, chosen), ids, row.positions[:, chosen].long(), 1)
