"""Parallel context windows: every passage is read alone, at the same positions, and the question reads them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rag_posfix.attention.masks import independent_passages_mask
from rag_posfix.attention.plan import Plan, RowPlan
from rag_posfix.attention.shape import Capability, ModelShape
from rag_posfix.attention.spans import Layout
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation

__all__ = ["ParallelWindows", "window_positions"]


def window_positions(layout: Layout) -> Tensor:
    """Return positions where each passage starts after the prefix and the suffix after the longest passage.

    Formula: prefix 0..P-1; token t of any passage P + t; token t of the suffix P + max(n_i) + t.

    Shapes:
        returns: (1, T) float32.
    """
    start = len(layout.prefix)
    longest = max((len(span) for span in layout.passages), default=0)
    pieces = [torch.arange(start), *(start + torch.arange(len(span)) for span in layout.passages)]
    pieces.append(start + longest + torch.arange(len(layout.suffix)))
    return torch.cat(pieces).float()[None]


@MITIGATIONS.register("parallel_windows")
@dataclass(frozen=True)
class ParallelWindows(Mitigation):
    """Give each passage the same positions and let none see another; the question sees all.

    No passage is nearer to the question than another, so none is favoured by where it stands. The price is that no
    passage can be read in the light of another, and that a model which was never trained on such a context answers
    worse than on its best order.

    Source: Ratner et al. (2023), Parallel Context Windows, section 3, https://arxiv.org/abs/2212.10947
    Formula: position of token t of a passage = P + t; of the suffix = P + max(n_i) + t (the paper's p_i, with one
        window per passage); a passage attends to the prefix and to itself, the suffix to everything.
    Differs from the paper: one window per passage; the shared prefix (chat template, instructions) is encoded once
        and seen by every window instead of being repeated in each; passages stand in memory in an order given by
        their content, so that the caller's order never reaches the arithmetic.
    Cost: attention of each passage over itself and the prefix only: less than the unmodified model.
    Limits: models whose every layer keeps all keys and whose positions can be set.
    Helps: with many short examples in the prompt, such as classification into more than six classes (7 points of
        accuracy with LLaMA 65B in the paper), and where passages are to be encoded once and used again.
    Hurts: when an instruct model writes an answer from passages. On Lost in the Middle, Llama-3.1-8B falls from
        50-55 % to 12 % at 10 passages and to 4 % at 20 (measured in RoToR, 2025, https://arxiv.org/abs/2502.08662);
        SmolLM2-135M is below the unmodified model's worst place (docs/results.md). And when passages have to be read
        in the light of each other: bridge questions of HotpotQA lose 3 points in the paper.
    """

    name: ClassVar[str] = "parallel_windows"
    paper: ClassVar[str] = (
        "Ratner et al. (2023), Parallel Context Windows for Large Language Models, https://arxiv.org/abs/2212.10947"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "One window per passage.",
        "The prefix is encoded once and shared by all windows.",
        "Passages are laid in memory in a content-given order.",
    )
    order_invariant: ClassVar[bool] = True
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.POSITIONS, Capability.FULL_CACHE})

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row with shared passage positions and passages that do not see each other."""
        order = layout.canonical_order()
        row = layout.select(order)
        return Plan(
            rows=(RowPlan(passages=order, positions=window_positions(row), mask=independent_passages_mask(row)),),
            independent_passages=True,
        )
