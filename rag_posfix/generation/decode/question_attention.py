"""How much attention a question pays to each token of each passage, for several questions about the same passages.

Knows layouts and batches; knows no method, no text and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch
from rag_posfix.generation.prefill.kv_lookup import KVLookup
from rag_posfix.generation.prefill.prefill import prefill_context
from rag_posfix.patching.forward_context import Observer
from rag_posfix.plan.layout import Layout

__all__ = ["question_attention"]


@torch.inference_mode()
def question_attention(
    loaded: LoadedModel,
    layouts: Sequence[Layout],
    kv_lookup: KVLookup | None = None,
    check: Callable[[], None] | None = None,
    layers: Collection[int] | None = None,
) -> list[tuple[tuple[float, ...], ...]]:
    """Return for each prompt, passage and token the attention that the prompt's suffix pays to it.

    Formula: s_i = sum over the layers and all heads of the mean over the suffix's tokens t of A(t, i).
    Cost: prefix and passages are read once, then each suffix. Of each layer's attention only the suffix's rows are
        materialised. Where layers do not keep all keys (sliding windows), each prompt is read whole.

    Args:
        loaded: The model.
        layouts: Prompts that differ in their suffix alone.
        kv_lookup: The passage KV store; None computes all keys and values.
        check: Called before each suffix is read; what it raises ends the reading.
        layers: Which layers count, from 0; all if None.

    Raises:
        ConfigError: the prompts differ in more than their suffix, or the model has no such layer.
    """
    count = loaded.spec.shape.n_layers
    if layers is not None and not (layers and all(0 <= layer < count for layer in layers)):
        raise ConfigError(f"layers={sorted(layers)} must name one or more of the model's layers, 0 to {count - 1}")
    leading = {layout.token_ids[: layout.suffix.start] for layout in layouts}
    if len(leading) > 1 or len({layout.passages for layout in layouts}) > 1:
        raise ConfigError(
            f"{len(layouts)} prompts differ before their suffix; give prompts with the same prefix and passages"
        )
    before = prefill_context(loaded, layouts[0], kv_lookup) if layouts and loaded.keeps_all_keys else None
    found = []
    for layout in layouts:
        if check is not None:
            check()
        attended = _of_suffix(loaded, layout, before, layers)
        found.append(tuple(tuple(attended[span.slice].tolist()) for span in layout.passages))
    return found


def _of_suffix(
    loaded: LoadedModel, layout: Layout, before: SequenceBatch | None, layers: Collection[int] | None
) -> Tensor:
    """Return the attention to every token, (T,) float32 on the CPU."""
    if before is None:
        start, batch = 0, SequenceBatch.empty(loaded)
    else:
        start, batch = layout.suffix.start, before.branch()
    observer = Observer(queries=len(layout.suffix), layers=None if layers is None else frozenset(layers))
    ids = torch.tensor([layout.token_ids[start:]], device=loaded.device)
    positions = torch.arange(start, len(layout.token_ids), dtype=torch.float32)
    batch.forward(ids, positions[None], 1, observer)
    if observer.total is None:
        raise ConfigError("no layer of the model reported its attention; load it with rag_posfix.load_engine")
    total: Tensor = observer.total[0] * loaded.spec.shape.n_heads  # the observer averages over heads
    return total.float().cpu()
