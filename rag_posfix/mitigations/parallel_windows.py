"""Parallel context windows: passages are encoded independently at the same positions; the question attends to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rag_posfix.attention.masks import Indentation, WindowedAttention, window_positions, windows_mask, windows_of
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan


@MITIGATIONS.register("parallel_windows", aliases=("pcw",))
@dataclass(frozen=True)
class ParallelWindows(Mitigation):
    """Put the passages into windows that share positions and do not attend to each other; the question attends to all.

    All windows have the same distance to the question, so none is preferred by its position. There are two
    disadvantages: a passage cannot use the content of other windows, and a model that was not trained with such a
    context answers worse than with its best order.

    Source: Ratner et al. (2023), Parallel Context Windows, section 3, https://arxiv.org/abs/2212.10947
    Formula: position of token t of a window = P + t; of the suffix = P + max(n_w) + t, n_w the tokens of window w (the
        paper's p_i); a window attends to the prefix and, causally, to itself, the suffix to everything. With right
        indentation the tokens of a window have the positions P + max(n_w) - n_w + t, so that all windows end at the
        suffix.
    Differs from the paper: passages are assigned to windows by content, neighbours in canonical order, never by the
        given order; the shared prefix (chat template, instructions) is encoded once and seen by every window
        instead of being repeated in each, so that there is one BOS, also under right indentation, where the authors'
        code shifts each window with a first token of its own.
    Helps: tasks with many short independent items, such as examples of a classification task. A cold prompt costs less
        than the unmodified model's.
    Hurts: generated answers over several passages; questions that need two passages lose most.
    Cost: attention of each window over itself and the prefix only: less than the unmodified model.
    Limits: models in which every layer has all keys and whose positions can be set.

    Args:
        windows: Number of windows; None = one per passage. Neighbours in canonical order share a window, in groups of
            nearly equal size.
        indentation: ``left`` starts all windows at the same position, ``right`` ends them at the same position.
    """

    name = "parallel_windows"
    order_invariant = True
    requires = frozenset({Capability.POSITIONS, Capability.FULL_CACHE, Capability.SOFTMAX})

    windows: Annotated[int | None, Integer(1)] = None
    indentation: Indentation = "left"

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose windows share positions and do not attend to each other."""
        order = layout.canonical_order()
        row = layout.select(order)
        windows = windows_of(row, self.windows)
        positions = window_positions(row, windows, self.indentation)
        if len(windows) == layout.n_passages:
            return Plan(
                rows=(RowPlan(passages=order, positions=positions, mask=windows_mask(row, windows)),),
                independent_passages=True,
            )
        return Plan(rows=(RowPlan(passages=order, positions=positions, attend=WindowedAttention(row, windows)),))
