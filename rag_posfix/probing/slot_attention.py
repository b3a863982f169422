"""How much attention a model pays to each place of a prompt, whatever stands there.

Knows loaded models and layouts; no method, no task and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.calibration_pass import passage_attention
from rag_posfix.plan.dummy import with_dummy
from rag_posfix.plan.layout import Layout

__all__ = ["measure_slots"]


@torch.inference_mode()
def measure_slots(
    loaded: LoadedModel, layouts: Sequence[Layout], progress: Callable[[int, int], None] | None = None
) -> tuple[float, ...]:
    """Return the attention of the last token to a dummy passage in each slot, averaged over prompts.

    Source: Hsieh et al. (2024), Found in the Middle, section 3, https://arxiv.org/abs/2406.16008
    Formula: mean over prompts of Attn(dummy, k), the mean attention per token of a dummy in slot k, averaged over
        layers and heads; the other passages stay.
    Cost: each prompt is read once, and again from each dummy on.

    Args:
        loaded: The model.
        layouts: Prompts with the same number of passages, two or more.
        progress: Called with prompts done and prompts in all.

    Raises:
        ConfigError: there are no prompts, or they differ in their number of passages, or have fewer than two.
    """
    counts = sorted({layout.n_passages for layout in layouts})
    if len(counts) != 1 or counts[0] < 2:
        raise ConfigError(
            f"{len(layouts)} prompts with {counts} passages cannot be averaged; give at least one, all with the same "
            "number of passages, two or more"
        )
    total = torch.zeros(counts[0])
    for done, layout in enumerate(layouts):
        measured, _ = passage_attention(loaded, [layout, *(with_dummy(layout, slot) for slot in range(counts[0]))])
        total += measured[1:].diagonal()
        if progress is not None:
            progress(done + 1, len(layouts))
    return tuple(float(value) / len(layouts) for value in total)
