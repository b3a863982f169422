"""Attention computed the plain way, so that a probe can see its probabilities or change its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import scores, weigh
from rag_posfix.plan.plan import AttentionInput, AttentionOverride
from rag_posfix.probing.subject import Change, Watch


@dataclass(frozen=True, eq=False)
class WatchedAttention(AttentionOverride):
    """Causal softmax(QK^T scaling)V in float32, watched and changed.

    Cost: the (B, Hq, T, T) scores of one layer at a time.

    Attributes:
        watch: Who receives probabilities and outputs.
        change: Another mask, or other scores.
    """

    watch: Watch
    change: Change
    layers: range | None = None
    plain_from: int | None = None

    def __call__(self, given: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, Tq, D), and None: nobody else observes a probe's pass."""
        n_key, device = given.key.shape[2], given.key.device
        key_at = torch.arange(n_key, device=device)[None, :]
        query_at = torch.arange(given.start, n_key, device=device)[:, None]
        mask = self.change.mask
        seen = key_at <= query_at if mask is None else mask(query_at, key_at)
        found = scores(given.query, given.key, given.scaling).masked_fill(~seen, float("-inf"))
        if self.change.scores is not None:
            found = self.change.scores(given.layer, found)
        probabilities = found.softmax(dim=-1)
        attended = weigh(probabilities, given.value)
        if self.watch.weights is not None:
            self.watch.weights(given.layer, probabilities)
        if self.watch.attended is not None:
            self.watch.attended(given.layer, attended)
        return attended, None
