"""A row of a plan resolved for one prompt: its tokens, their positions, and what it changes in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.patching.forward_context import Overrides
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import RowPlan


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedRow:
    """A row of a plan with the layout of what it sees, its positions, and what it changes in the model.

    Attributes:
        layout: Of the row's own tokens.
        passages: Which passages of the prompt it holds, in its order.
        positions: (1, T) float32 on the CPU: they are looked at one by one, and go to the device with the tokens.
        overrides: What it changes in the model.
        reusable: As in ``RowPlan``.
    """

    layout: Layout
    passages: tuple[int, ...]
    positions: Tensor
    overrides: Overrides
    reusable: tuple[int, ...] = ()

    @property
    def passage_spans(self) -> list[tuple[int, Span]]:
        """Each passage of the prompt that the row holds, and its span in the row."""
        return list(zip(self.passages, self.layout.passages, strict=True))


def resolve(row: RowPlan, layout: Layout, device: torch.device) -> ResolvedRow:
    """Return a row of a plan for one prompt."""
    passages = tuple(range(layout.n_passages)) if row.passages is None else row.passages
    seen = layout if row.passages is None else layout.select(passages)
    positions = row.positions
    if positions is None:
        positions = torch.arange(len(seen.token_ids), dtype=torch.float32)[None]
    overrides = Overrides(
        mask=row.mask,
        rope_base_factor=row.rope_base_factor,
        layer_scale=None if row.layer_scale is None else tuple(row.layer_scale.tolist()),
        head_scale=row.head_scale,
        hidden_scale=row.hidden_scale,
        attend=None if row.attend is None else row.attend.on(device),
    )
    return ResolvedRow(seen, passages, positions, overrides, row.reusable)


def passage_starts(rows: Sequence[ResolvedRow], passage: int) -> set[float]:
    """Return the first position of a passage of the prompt in each row that holds it."""
    return {
        float(row.positions[0, span.start])
        for row in rows
        for held, span in row.passage_spans
        if held == passage and len(span)
    }
