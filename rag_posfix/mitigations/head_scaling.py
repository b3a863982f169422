"""Head scaling: each head divides positions by its own divisor, chosen by how position-aware the head is."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.errors import ConfigError
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.mitigations.base import MITIGATIONS, Mitigation
from rag_posfix.parameters import Integer, Number
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowPlan


def position_awareness(query: Tensor, key: Tensor, alpha: float) -> Tensor:
    """Return the share of keys with outstanding attention of the last query, for each key head.

    Formula: A = softmax(q k / sqrt(D)) without rotation; S(h) = share of keys with A >= alpha mean(A) = alpha / Tk;
        the mean of S over the query heads that share a key head.

    Shapes:
        query: (1, Hq, 1, D). key: (1, Hkv, Tk, D). returns: (Hkv,) float32.
    """
    n_kv_heads, size = key.shape[1], key.shape[3]
    grouped = query[0, :, 0].float().view(n_kv_heads, -1, size)  # (Hkv, G, D)
    attention = (grouped @ key[0].float().transpose(-1, -2) * size**-0.5).softmax(dim=-1)  # (Hkv, G, Tk)
    stands_out: Tensor = attention >= alpha * attention.mean(dim=-1, keepdim=True)
    return stands_out.float().mean(dim=(1, 2))


def divisors(awareness: Tensor, low: float, high: float) -> Tensor:
    """Return the divisor of each head, evenly spaced from ``low`` (most position-aware) to ``high`` (least).

    Formula: low + rank(h) (high - low) / (n - 1); the rank of a head is its index in the order by awareness. Heads
        with equal awareness stay in the order of the model. A single head gets the mean of ``low`` and ``high``.

    Shapes:
        awareness: (n,). returns: (n,) float32.
    """
    n_heads = awareness.shape[0]
    if n_heads == 1:
        return torch.full((1,), (low + high) / 2, device=awareness.device)
    order = torch.argsort(awareness, descending=True, stable=True)  # order[i] = the i-th most aware head
    rank = torch.argsort(order)  # rank[h] = the position of head h in it
    return low + rank.float() * ((high - low) / (n_heads - 1))


@MITIGATIONS.register("head_scaling", aliases=("ms_poe",))
@dataclass(frozen=True)
class HeadScaling(Mitigation):
    """Divide positions by a divisor per head, from the most to the least position-aware head.

    Dividing positions brings far tokens nearer. A head whose attention stands out at few tokens of the prompt depends
    more on position than on content and gets a larger divisor. A head whose attention stands out at many tokens gets a
    divisor near that of training. Together the heads read the prompt at several scales.

    Source: Zhang et al. (2024), Found in the Middle: Ms-PoE, equation 2 and algorithm 1,
        https://arxiv.org/abs/2403.04797
    Formula: A_h = softmax(q k_i / sqrt(D)) of the prompt's last token over all tokens, before rotation;
        S(h) = share of tokens i with A_h,i >= alpha mean(A_h); the heads of a layer in order of falling S get
        r_i = low + i (high - low) / (n - 1), i = 0 ... n - 1. Head h rotates position m by the angles of m / r_h.
        Decided per layer after the prefill, and fixed for the generation.
    Differs from the paper: query heads that share a key head share its divisor and the mean of their S, because the
        paper's models share no keys and a key has one position. A head gets the divisor of its rank, as in the text of
        the paper; the indexing of its algorithm 1 and code applies the inverse permutation, and that code never
        reaches ``high``. Heads with the same S stay in the order of the model. With a single key head there is no
        ranking, and all heads get the mean of ``low`` and ``high``. A is scaled by 1 / sqrt(D) regardless of the
        model's scaling.
    Helps: models that read the middle of a long prompt badly and have many key heads.
    Hurts: newer models, such as Qwen1.5 and Gemma, whose key-value retrieval failed. With few key heads the divisors
        are coarse: three heads have three scales.
    Cost: one row of scores per layer after the prefill; the angles of each head in every layer and step.
    Limits: models whose queries and keys are available before rotation. YaRN and dynamic scaling rescale positions
        already. The answer depends on the order of the passages.

    Args:
        low: Divisor of the most position-aware head, 0.1 to 10. 1 for ``low`` and ``high`` changes nothing.
        high: Divisor of the least position-aware head, ``low`` to 10.
        alpha: Factor of the mean attention above which a token stands out, 0 to 100.
        skip_layers: Number of first layers that are not changed, 0 or more.
    """

    name = "head_scaling"
    requires = frozenset({Capability.ROTATION})
    identity_parameters = MappingProxyType({"low": 1.0, "high": 1.0})
    neutral_is_identity = True
    uses_last_prompt_token = True
    compares_kv_heads = True

    low: Annotated[float, Number(0.1, 10)] = 1.2
    high: Annotated[float, Number(0.1, 10)] = 1.8
    alpha: Annotated[float, Number(0, 100)] = 3.0
    skip_layers: Annotated[int, Integer(0)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"head_scaling: low={self.low!r} must not exceed high={self.high!r}; swap them")

    def plan(self, layout: Layout, model: ModelShape) -> Plan:
        """Return one row whose heads divide positions by divisors that the prompt decides."""
        return Plan(rows=(RowPlan(head_scale=self._decide),))

    def _decide(self, layer: int, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the divisors of a layer's key heads. A ``HeadScale`` of ``attention.plan``."""
        if layer < self.skip_layers:
            return None
        return divisors(position_awareness(query, key, self.alpha), self.low, self.high)
