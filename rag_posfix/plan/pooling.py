"""Methods with several rows: the relevance of passages as log weights, and the mixture of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rag_posfix.plan.layout import Layout

RELEVANCE_FLOOR = 0.01
"""Lower bound of a relevance, so that its logarithm is finite."""


def log_relevance(layout: Layout, passages: Sequence[int]) -> Tensor:
    """Return the log relevance of some passages, at least log 0.01; zeros if the prompt has no relevance.

    Shapes:
        returns: (len(passages),) float32.
    """
    given = torch.tensor([layout.relevance[i] if layout.relevance else 1.0 for i in passages])
    return given.clamp(min=RELEVANCE_FLOOR).log()


def mixture(log_probs: Tensor, log_weights: Tensor) -> Tensor:
    """Return log sum_r w_r p_r(t), normalised over the vocabulary.

    Shapes:
        log_probs: (R, V). log_weights: (R,). returns: (V,).
    """
    pooled = (log_probs + log_weights[:, None]).logsumexp(dim=0)
    return pooled - pooled.logsumexp(dim=0)


def per_device(tensor: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function that gives ``tensor`` on a device. It is copied to each device once, not at every token."""
    return functools.cache(lambda device: tensor.to(device))
