"""The calibration pass: prompts that are read unmodified before the plan is decided. Knows no method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.kv_lookup import KVLookup
from rag_posfix.generation.prefill.prefill import extend, prefill
from rag_posfix.generation.prefill.prefilled import PrefilledGroup
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowPlan


def prefill_calibrated(
    loaded: LoadedModel, layout: Layout, plan: Plan, kv_lookup: KVLookup | None = None
) -> tuple[Plan, list[PrefilledGroup]]:
    """Run the plan's calibration pass, if it has one, then prefill; return the plan that was run and its groups.

    Raises:
        PlanConflictError: a calibration pass whose prompt is continued has decided on several rows.
    """
    calibration = plan.calibration
    if calibration is None:
        return plan, prefill(loaded, layout, plan, kv_lookup)
    measured, first = passage_attention(loaded, calibration.layouts, calibration.continue_from or 0, kv_lookup)
    decided = calibration.decide(measured)
    if calibration.continue_from is None or not loaded.keeps_all_keys:
        return prefill_calibrated(loaded, layout, decided, kv_lookup)
    if len(decided.rows) != 1 or decided.calibration is not None:
        raise PlanConflictError(
            f"a calibration pass decided on {len(decided.rows)} rows; where its prompt is continued it must decide on "
            "one row, without a further calibration pass"
        )
    group = extend(loaded, layout, decided.rows[0], first.batch, first.batch.length - 1)
    return decided, [replace(group, cached_tokens=first.cached_tokens)]


def passage_attention(
    loaded: LoadedModel,
    layouts: Sequence[Layout],
    base: int = 0,
    kv_lookup: KVLookup | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Tensor, PrefilledGroup]:
    """Read prompts unmodified; return the last token's mean attention per token of each passage, and one prefill.

    Cost: the prompt ``base`` is read whole; of every other, only what follows the tokens that it shares with it.
    ``check`` is called before each of the others; what it raises ends the pass.

    Shapes:
        returns: (len(layouts), N) float32 on the CPU, averaged over layers and heads; the prefill of ``base``.
    """
    plain = Plan(rows=(RowPlan(reusable=layouts[base].boundaries),))
    whole = prefill(loaded, layouts[base], plain, kv_lookup)[0]
    rows = []
    for index, layout in enumerate(layouts):
        if check is not None and index != base:
            check()
        if index == base:
            group = whole
        elif loaded.keeps_all_keys:
            group = extend(loaded, layout, RowPlan(), whole.batch, _shared_tokens(layout, layouts[base]))
        else:
            group = prefill(loaded, layout, Plan())[0]
        rows.append(group.passage_attention[0].float())
    lengths = torch.tensor([[max(len(span), 1) for span in layout.passages] for layout in layouts])
    return torch.stack(rows).cpu() / lengths, whole  # read once


def _shared_tokens(layout: Layout, other: Layout) -> int:
    """Return how many first tokens two prompts share, the last token of the shorter left out."""
    pairs = enumerate(zip(layout.token_ids[:-1], other.token_ids[:-1], strict=False))
    same = min(len(layout.token_ids), len(other.token_ids)) - 1
    return next((index for index, (ours, theirs) in pairs if ours != theirs), same)
