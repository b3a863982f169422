"""Layer scaling: each layer divides positions by its own divisor, from a Bezier curve over the depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated

from rag_posfix.lazy_torch import torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import NumberList
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan


def bezier(points: Sequence[float], t: float) -> float:
    """Return the height of a Bezier curve with these control heights at ``t``, 0 to 1, by de Casteljau's steps.

    Formula: s(t) = sum_i C(n, i) (1 - t)^(n - i) t^i P_i. Repeated interpolation gives the same number, and exactly P
        where all heights are P.
    """
    heights = list(points)
    while len(heights) > 1:
        heights = [left + t * (right - left) for left, right in pairwise(heights)]
    return heights[0]


@MITIGATIONS.register("layer_scaling", aliases=("lpes",))
@dataclass(frozen=True)
class LayerScaling(Mitigation):
    """Divide positions by a divisor per layer that changes smoothly from the first layer to the last.

    Dividing positions brings far tokens nearer, so that the decay of attention with distance begins later. The gain
    depends on the depth of a layer, so each layer has its own divisor. A curve over the depth reduces the number of
    parameters.

    Source: LPES, layer-specific positional scaling (2025), https://arxiv.org/abs/2503.04355, revised as
        https://arxiv.org/abs/2606.27705
    Formula: layer l of L rotates position m by the angles of m / s(t), t = l / (L - 1), where s is the Bezier curve
        s(t) = sum_i C(n, i) (1 - t)^(n - i) t^i P_i with the control heights P_0 ... P_n = ``points``.
    Differs from the paper: the control heights are parameters instead of being found by a genetic algorithm on a
        search set; the default heights are mild and were not searched for. A model of one layer uses P_0.
    Helps: where the middle of a long prompt is read badly and the heights were searched for on the model.
    Hurts: with heights that do not suit the model: reviews of the paper found them sensitive to the search set, and
        the curve little better than a straight line. Models with YaRN or LongRoPE scale positions already.
    Cost: that of the unmodified model; the angles are computed in each layer instead of once.
    Limits: models whose rotary encoding accepts other angles. The answer depends on the order of the passages.

    Args:
        points: Control heights of the curve from the first layer to the last, 1 to 16 numbers, 0.1 to 10. Values above
            1 bring tokens nearer. The curve starts at the first and ends at the last; (1,) changes nothing.
    """

    name = "layer_scaling"
    requires = frozenset({Capability.ANGLES})
    identity_parameters = MappingProxyType({"points": (1.0, 1.0, 1.0)})
    neutral_is_identity = True

    points: Annotated[tuple[float, ...], NumberList(0.1, 10, min_length=1, max_length=16)] = (1.0, 1.5, 1.0)

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose layers divide positions by the values of the curve."""
        last = max(model.n_layers - 1, 1)
        scale = torch.tensor([bezier(self.points, layer / last) for layer in range(model.n_layers)])
        return Plan(rows=(RowPlan(layer_scale=scale, reusable=layout.boundaries),))
