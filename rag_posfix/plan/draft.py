"""Short answers that the rows of a plan write before the answer, and what is decided from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rag_posfix.errors import PlanConflictError


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The short answer that each row wrote alone, and what every row says of every one.

    Attributes:
        tokens: One answer per row, without what ended it.

    Shapes:
        log_probs: (R, R) float32, [d, k] the summed log-probability of answer d in row k.
        same: (R, R) bool, whether two answers say the same.
        question: (R,) float32, as in ``RowScores``.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_probs: Tensor
    same: Tensor
    question: Tensor


Choose = Callable[[Drafts], Tensor]
"""Drafts -> (R,) weights of the rows, none negative, that sum to 1. Rows of weight 0 are not read any further, and
``RowScores`` is then that of the other rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Before the answer, every row writes a short one alone; what they wrote says how much each row counts.

    The rows then continue from the prompt: a draft leaves no trace but ``RowScores.weights``.

    Attributes:
        max_tokens: Tokens per short answer at most; it also ends with its first line.
        choose: Weighs the rows by what they wrote.
    """

    max_tokens: int
    choose: Choose

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise PlanConflictError(f"a draft has max_tokens={self.max_tokens}; it needs at least 1")
