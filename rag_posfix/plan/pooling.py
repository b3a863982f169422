"""Methods with several rows: the relevance of passages as log weights, and the mixture of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rag_posfix.plan.layout import Layout

Relevance = Literal["question", "score", "both"]
"""What a passage is weighed by: the likelihood of the question after it, the score that came with it, or both."""

RELEVANCE_FLOOR = 0.01
"""Lower bound of a relevance, so that its logarithm is finite."""


def log_relevance(layout: Layout, passages: Sequence[int]) -> Tensor:
    """Return the log relevance of some passages, at least log 0.01; zeros if the prompt has no relevance.

    Shapes:
        returns: (len(passages),) float32.
    """
    relevance = torch.tensor([layout.relevance[i] if layout.relevance else 1.0 for i in passages])
    return relevance.clamp(min=RELEVANCE_FLOOR).log()


def relevance_rule(source: Relevance, score: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function from the rows' log-probability of the question to the log relevance of their passages.

    Shapes:
        score: (N,), ``log_relevance``. The function: (N,) -> (N,).
    """
    score_on = per_device(score)

    def relevance(question: Tensor) -> Tensor:
        if source == "question":
            return question
        return score_on(question.device) + (question if source == "both" else 0.0)

    return relevance


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
