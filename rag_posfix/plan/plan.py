"""The plan: what one generation does differently from the model as it was trained. Data and pure functions only.

A mitigation makes a plan, the engine runs it, and neither knows the other. A plan never sees a module, a cache or a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rag_posfix.errors import PlanConflictError
from rag_posfix.plan.attention_override import AttentionOverride
from rag_posfix.plan.draft import Draft
from rag_posfix.plan.layout import Layout

MaskFunction = Callable[[Tensor, Tensor], Tensor]
"""Complete mask of the prompt: (query index, key index) -> bool, True = may attend. Both index tensors broadcast and
count the row's own tokens from 0. Generated tokens see everything before them, whatever the mask."""


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """What each row of an ensemble says about the next token.

    Shapes:
        log_probs: (R, V) float32, log-softmax of each row's logits.
        question: (R,) float32, mean log-probability of the question's tokens in each row; zeros unless the plan asks
            for it with ``score_question``.
        answer: (R,) float32, summed log-probability of the tokens generated so far in each row.
        confidence: (R,) float32, log-probability of the likeliest first token of the answer in each row.
        weights: (R,) float32, how much each row counts by the plan's draft; None without a draft.
    """

    log_probs: Tensor
    question: Tensor
    answer: Tensor
    confidence: Tensor
    weights: Tensor | None = None


Combine = Callable[[RowScores], tuple[Tensor, Tensor]]
"""RowScores -> ((V,) log-probabilities of the next token, (R,) weights of the rows that sum to 1)."""


HeadScale = Callable[[int, Tensor, Tensor], Tensor | None]
"""(layer, the prompt's last query unrotated (1, Hq, 1, D), all keys unrotated (1, Hkv, Tk, D)) -> position divisor of
each key/value head (Hkv,) float32, or None to leave the layer alone. Asked once per layer when the prompt has been
read; the answer holds for the whole generation. The query heads of a group share their key head's divisor."""


@dataclass(frozen=True, slots=True, eq=False)
class HiddenScale:
    """Scale one channel of what the attention of the newest token sees, for queries and keys only.

    Attributes:
        channel: Which hidden channel.
        factor: What it is multiplied by.
        layers: In which layers.
    """

    channel: int
    factor: float
    layers: range


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """One sequence that the model reads.

    Attributes:
        passages: Which passages it sees, in which order; None = all, in the order of the prompt.
        positions: (1, T) float32, the position of each of the row's tokens, may be fractional; None = 0, 1, 2, ...
            Generated tokens continue after the last one.
        mask: Complete mask; None = causal.
        rope_base_factor: What the model's own RoPE base is multiplied by.
        layer_scale: (n_layers,) float32, what positions are divided by in each layer.
        head_scale: What positions are divided by in each head, decided from the prompt.
        hidden_scale: A hidden channel that is scaled for the newest token.
        attend: Replaces softmax(QK^T)V.
        reusable: Numbers n of tokens, ascending, for which keys and values of the row's first n tokens depend on these
            tokens alone: another prompt that begins with the same n tokens may use them. None beyond the suffix.
        joint: Passages of this row attend to those before them, also where the plan's passages are independent.
            Such rows come last.
    """

    passages: tuple[int, ...] | None = None
    positions: Tensor | None = None
    mask: MaskFunction | None = None
    rope_base_factor: float | None = None
    layer_scale: Tensor | None = None
    head_scale: HeadScale | None = None
    hidden_scale: HiddenScale | None = None
    attend: AttentionOverride | None = None
    reusable: tuple[int, ...] = ()
    joint: bool | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationPass:
    """Prompts that are read unmodified before it is decided what is done differently.

    Attributes:
        layouts: The prompts, each with as many passages as the others.
        decide: (len(layouts), N) float32, the mean attention per token of each passage by the prompt's last token,
            averaged over layers and heads -> the plan that is run.
        continue_from: Which of ``layouts`` is the very prompt that is asked, where the plan that is decided on has one
            row and leaves all before the prompt's last token as it is: the reading is then continued, not repeated.
    """

    layouts: tuple[Layout, ...]
    decide: Callable[[Tensor], Plan]
    continue_from: int | None = None

    def __post_init__(self) -> None:
        if not self.layouts:
            raise PlanConflictError("a calibration reads 0 prompts; it needs at least one")


@dataclass(frozen=True, slots=True)
class Blend:
    """Passages are read apart, moved to their places, and some of their tokens are read again in the whole prompt.

    Attributes:
        fraction: How many of the passages' tokens are read again, 0 to 1.
        by: Which: ``deviation``, those whose values differ most from what the whole prompt makes of them, or
            ``first``, the first of each passage.
        layers: The first layers, which are computed for all tokens; the last of them shows the deviation.
    """

    fraction: float
    by: Literal["deviation", "first"]
    layers: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generation does differently. Every field at its default means: as the model was trained.

    Attributes:
        rows: The sequences that the model reads; one for most methods.
        combine: Merges the rows' log-probabilities at every step. Needed for two rows or more.
        independent_passages: No passage attends to another and no passage's positions depend on another, so the
            engine may encode each once and reuse it; joint rows excepted.
        score_question: Rows are asked how likely they find the question (``RowScores.question``).
        draft: Lets the rows write short answers first, which decide their weights (``RowScores.weights``).
        calibration: What is read first; the plan that it decides on is run in the place of this one.
        blend: The one row, which changes nothing, is put together from passages that were read apart.
    """

    rows: tuple[RowPlan, ...] = (RowPlan(),)
    combine: Combine | None = None
    independent_passages: bool = False
    score_question: bool = False
    draft: Draft | None = None
    calibration: CalibrationPass | None = None
    blend: Blend | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanConflictError("a plan has 0 rows; it needs at least one")
        if len(self.rows) > 1 and self.combine is None:
            raise PlanConflictError(f"a plan has {len(self.rows)} rows and no combine; say how to merge them")
        joint = [bool(row.joint) for row in self.rows]
        if joint != sorted(joint) or (all(joint) and self.independent_passages):
            raise PlanConflictError(
                "joint rows must come last, after a row with independent passages; reorder the rows"
            )
        if self.draft is not None and self.combine is None:
            raise PlanConflictError("a plan has a draft and no combine, so its weights would have no use; give both")
