"""The plan: what one generation does differently from the model as it was trained. Data and pure functions only.

A mitigation makes a plan, the engine runs it, and neither knows the other. A plan never sees a module, a cache or a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rag_posfix.errors import PlanConflictError

__all__ = ["Choose", "Combine", "Draft", "Drafts", "MaskFunction", "Plan", "RowPlan", "RowScores"]

MaskFunction = Callable[[Tensor, Tensor], Tensor]
"""Complete mask: (query index, key index) -> bool, True = may attend. Both index tensors broadcast; indices count the
row's own tokens from 0, and tokens after the prompt are generated ones."""


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """What each row of an ensemble says about the next token.

    Shapes:
        log_probs: (R, V) float32, log-softmax of each row's logits.
        question: (R,) float32, mean log-probability of the question's tokens in each row; zeros unless the plan asks
            for it with ``score_question``.
        answer: (R,) float32, summed log-probability of the tokens generated so far in each row.
        weights: (R,) float32, what the plan's draft chose; None without a draft.
    """

    log_probs: Tensor
    question: Tensor
    answer: Tensor
    weights: Tensor | None = None


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


Combine = Callable[[RowScores], tuple[Tensor, Tensor]]
"""RowScores -> ((V,) log-probabilities of the next token, (R,) weights of the rows that sum to 1)."""


Choose = Callable[[Drafts], Tensor]
"""Drafts -> (R,) weights of the rows, none negative, that sum to 1."""


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


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """One sequence that the model reads.

    Attributes:
        passages: Which passages it sees, in which order; None = all, in the order of the prompt.
        positions: (1 | Hq, T) float32, the position of each of the row's tokens, may be fractional and may differ
            between heads; None = 0, 1, 2, ... Generated tokens continue after the last one.
        mask: Complete mask; None = causal.
    """

    passages: tuple[int, ...] | None = None
    positions: Tensor | None = None
    mask: MaskFunction | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generation does differently. Every field at its default means: as the model was trained.

    Attributes:
        rows: The sequences that the model reads; one for most methods.
        combine: Merges the rows' log-probabilities at every step. Needed for two rows or more.
        independent_passages: No passage attends to another and no passage's positions depend on another, so the
            engine may encode each once and reuse it.
        score_question: Rows are asked how likely they find the question (``RowScores.question``).
        draft: Lets the rows write short answers first, which decide their weights (``RowScores.weights``).
    """

    rows: tuple[RowPlan, ...] = (RowPlan(),)
    combine: Combine | None = None
    independent_passages: bool = False
    score_question: bool = False
    draft: Draft | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanConflictError("a plan has 0 rows; it needs at least one")
        if len(self.rows) > 1 and self.combine is None:
            raise PlanConflictError(f"a plan has {len(self.rows)} rows and no combine; say how to merge them")
        if self.draft is not None and self.combine is None:
            raise PlanConflictError("a plan has a draft and no combine, so its weights would have no use; give both")
