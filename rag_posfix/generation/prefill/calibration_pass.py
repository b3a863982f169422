"""Reads a prompt under a plan, and before that whatever the plan wants to have measured. Knows no method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.kv_reuse import Reuse
from rag_posfix.generation.prefill.prefill import PrefilledGroup, prefill, read_on
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowPlan

__all__ = ["measure", "read"]


def read(
    loaded: LoadedModel, layout: Layout, plan: Plan, reuse: Reuse | None = None
) -> tuple[Plan, list[PrefilledGroup]]:
    """Read the prompt and return the plan that was run and its groups of rows, as ``prefill`` does.

    Raises:
        PlanConflictError: a survey says that its reading may be continued, and decides on several rows.
    """
    survey = plan.survey
    if survey is None:
        return plan, prefill(loaded, layout, plan, reuse)
    measured, first = measure(loaded, survey.layouts, survey.continue_from or 0, reuse)
    decided = survey.decide(measured)
    if survey.continue_from is None or not loaded.keeps_all_keys:
        return read(loaded, layout, decided, reuse)
    if len(decided.rows) != 1 or decided.survey is not None:
        raise PlanConflictError(
            f"a survey decided on {len(decided.rows)} rows; where its reading is continued it must be one row, and "
            "no further survey"
        )
    rest = first.rows.first(first.rows.length - 1)
    group = read_on(loaded, layout, decided.rows[0], rest)
    return decided, [replace(group, cached_tokens=first.cached_tokens)]


def measure(
    loaded: LoadedModel,
    layouts: Sequence[Layout],
    base: int = 0,
    reuse: Reuse | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Tensor, PrefilledGroup]:
    """Read prompts unmodified; return the last token's mean attention per token of each passage, and one reading.

    Cost: the prompt ``base`` is read whole; of every other, only what follows the tokens that it shares with it.
    ``check`` is called before each of the others; what it raises ends the reading.

    Shapes:
        returns: (len(layouts), N) float32 on the CPU, averaged over layers and heads; the reading of ``base``.
    """
    plain = Plan(rows=(RowPlan(reusable=layouts[base].boundaries),))
    whole = prefill(loaded, layouts[base], plain, reuse)[0]
    rows = []
    for index, layout in enumerate(layouts):
        if check is not None and index != base:
            check()
        if index == base:
            group = whole
        elif loaded.keeps_all_keys:
            group = read_on(loaded, layout, RowPlan(), whole.rows.first(_shared(layout, layouts[base])))
        else:
            group = prefill(loaded, layout, Plan())[0]
        lengths = torch.tensor([max(len(span), 1) for span in layout.passages])
        rows.append(group.mass[0].float().cpu() / lengths)
    return torch.stack(rows), whole


def _shared(layout: Layout, other: Layout) -> int:
    """Return how many leading tokens two prompts share, the last token of the first left out."""
    pairs = enumerate(zip(layout.token_ids[:-1], other.token_ids[:-1], strict=False))
    same = min(len(layout.token_ids), len(other.token_ids)) - 1
    return next((index for index, (ours, theirs) in pairs if ours != theirs), same)
