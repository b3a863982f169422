"""The plan: what one generation does differently from the model as it was trained. Data and pure functions only.

A mitigation makes a plan, the engine runs it, and neither knows the other. A plan never sees a module, a cache or a
tokenizer.

Methods with several rows: the relevance of passages as log weights, the mixture of rows, copies of the question.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import ClassVar, Literal, NamedTuple, Protocol

from rag_posfix.errors import PlanConflictError
from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.plan.layout import Layout, Span


class Rotation(Protocol):
    """A layer's own rotation, with whatever else the plan does to positions. The identity in layers without RoPE.

    Positions are (B | 1, T), or (B | 1, h, T) where they differ between heads; h is 1, Hkv or Hq.
    """

    @property
    def name(self) -> Hashable:
        """Equal for layers of one sequence that rotate alike."""

    def __call__(self, states: Tensor, positions: Tensor) -> Tensor:
        """Return states (B, H, T, D) rotated to positions."""

    def phases(self, positions: Tensor) -> Tensor:
        """Return what each pair of channels is multiplied by as a complex number, (B | 1, h, T, pairs) complex64.

        No pairs in layers without RoPE. The modulus is what the model scales rotated vectors by, 1 for most.
        """


class RopeAppliedTo(Enum):
    """What an ``AttentionOverride`` gets rotated to its position. Keys that it gets rotated are cached rotated."""

    BOTH = "queries and keys"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInput:
    """One layer's attention in one forward pass.

    Shapes:
        query: (B, Hq, Tq, D), the last tokens. key, value: (B, Hkv, Tk, D), all tokens so far.
        positions: (B | 1, Tk) float32, the plan's positions of all tokens so far.

    Attributes:
        scaling: What scores are multiplied by.
        layer: Which layer, from 0.
        rotate: Rotates states to positions.
        standard_attention: Returns what the model would compute with queries and keys rotated to ``positions``, (B,
            Hq, Tq, D).
        needs_weights: Whether the attention of the last query is needed; if not, an override may return None for it.
        kept: What an override keeps for the tokens after the prompt, by layer or by a name of its own. Sequences that
            branch off share the tensors: they must not be changed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    scaling: float
    layer: int
    rotate: Rotation
    standard_attention: Callable[[], Tensor]
    needs_weights: bool = True
    kept: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The index of the first query among the keys."""
        return self.key.shape[2] - self.query.shape[2]


class AttentionOverride(ABC):
    """Replaces softmax(QK^T)V in one row of a plan; the batch size is 1.

    Attributes:
        rotated: What arrives rotated.
        needs_mask: Whether ``standard_attention`` is called for more than one query, so that the model's mask must be
            built. Leave it off where it can be: a mask is a T x T tensor.
        differentiable: Whether gradients flow through it exactly, so that a model can be trained under it.
        layers: In which layers; None = all.
        standard_from: Queries from this index on attend as the model was trained to, so that decoding equals the
            unmodified model's; None = none do.
    """

    rotated: ClassVar[RopeAppliedTo] = RopeAppliedTo.BOTH
    needs_mask: ClassVar[bool] = False
    differentiable: ClassVar[bool] = False
    layers: range | None = None
    standard_from: int | None = None

    @abstractmethod
    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, Hq, Tq, D) and what the last query attends to.

        The second is (B, Tk) float32, the attention of the last query averaged over heads, each row summing to 1;
        None where that is the ordinary attention of the last query at its own position, or is not requested.
        """

    def on(self, device: torch.device) -> AttentionOverride:
        """Return the same with its tensors on a device: a copy in each layer and step would wait for the device."""
        return self

    def visible(self, n_tokens: int) -> Tensor | None:
        """Return which token sees which in a prompt, (T, T) bool, for figures and tests; None = causal."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class CandidateAnswers:
    """The short answer of each row, and the log-probability of each answer in each row.

    Attributes:
        tokens: One answer per row, without what ended it.

    Shapes:
        log_probs: (R, R) float32, [d, k] the summed log-probability of answer d in row k.
        same: (R, R) bool, whether two answers are equal.
        question: (R,) float32, as in ``RowScores``.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_probs: Tensor
    same: Tensor
    question: Tensor


Choose = Callable[[CandidateAnswers], Tensor]
"""Weighs candidates: (R,) weights of the rows, none negative, that sum to 1. Rows of weight 0 are not read further
and not in ``RowScores``."""


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

    Attributes:
        first_sentence: Whether the answer is in its first sentence; True unless the plan sets ``tracks_sentence``.
    """

    log_probs: Tensor
    question: Tensor
    answer: Tensor
    confidence: Tensor
    weights: Tensor | None = None
    first_sentence: bool = True


Combine = Callable[[RowScores], tuple[Tensor, Tensor]]
"""RowScores -> ((V,) log-probabilities of the next token, (R,) weights of the rows that sum to 1)."""


HeadScale = Callable[[int, Tensor, Tensor], Tensor | None]
"""(layer, the prompt's last query unrotated (1, Hq, 1, D), all keys unrotated (1, Hkv, Tk, D)) -> position divisor of
each key/value head (Hkv,) float32, or None to leave the layer alone. Asked once per layer when the prompt has been
read; the answer holds for the whole generation. The query heads of a group share their key head's divisor."""


@dataclass(frozen=True, slots=True, eq=False)
class HiddenScale:
    """Scale one channel of what the attention of the last token sees, for queries and keys only.

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
        hidden_scale: A hidden channel that is scaled for the last token.
        attend: Replaces softmax(QK^T)V.
        reusable: Numbers n of tokens, ascending, for which keys and values of the row's first n tokens depend on these
            tokens alone: another prompt that begins with the same n tokens may use them. None beyond the suffix.
        all_passages: Passages of this row attend to those before them, also where the plan's passages are independent.
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
    all_passages: bool | None = None

    @property
    def is_plain_prompt(self) -> bool:
        """Whether the row is the prompt with some passages in some order, read as the model was trained."""
        chooses = ("passages", "reusable", "all_passages")
        return all(getattr(self, each.name) is None for each in fields(self) if each.name not in chooses)


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationPass:
    """Prompts that are read unmodified, before the plan is chosen.

    Attributes:
        layouts: The prompts, all with the same number of passages.
        decide: (len(layouts), N) float32, the mean attention per token of each passage by the prompt's last token,
            averaged over layers and heads -> the plan that is run.
        continue_from: Index of the layout that equals the prompt; its prefill is reused. For plans of one row that
            change nothing before the prompt's last token.
    """

    layouts: tuple[Layout, ...]
    decide: Callable[[Tensor], Plan]
    continue_from: int | None = None

    def __post_init__(self) -> None:
        if not self.layouts:
            raise PlanConflictError("a calibration reads 0 prompts; it needs at least one")


@dataclass(frozen=True, slots=True)
class Blend:
    """CacheBlend: encode passages independently, move them to their positions, recompute some of their tokens.

    Attributes:
        fraction: Share of the passages' tokens that are recomputed, 0 to 1.
        by: Which tokens: ``deviation``, whose values differ most from the values in the full prompt; ``first``, the
            first of each passage; or ``query``, which the question attends to most.
        layers: The first layers, which are computed for all tokens; the last of them shows the deviation.
    """

    fraction: float
    by: Literal["deviation", "first", "query"]
    layers: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one generation does differently. Every field at its default means: as the model was trained.

    Attributes:
        rows: The sequences that the model reads; one for most methods.
        combine: Merges the rows' log-probabilities at every step. Needed for two rows or more.
        independent_passages: No passage attends to another and no passage's positions depend on another, so the
            engine may encode each once and reuse it; all-passages rows excepted.
        score_question: Rows are asked how likely they find the question (``RowScores.question``).
        tracks_sentence: The end of the answer's first sentence is looked for (``RowScores.first_sentence``).
        draft: Lets the rows write short answers first, which decide their weights (``RowScores.weights``).
        calibration: What is read first; the plan that it decides on is run in the place of this one.
        layout: The prompt that is read in place of the one that the plan was made for: the same passages in the same
            places, with tokens cut out of them. Rows, positions and masks are those of this prompt.
        blend: Build the KV cache from independently encoded passages (CacheBlend).
        fits_windows: Prompt and answer fit the windows of a model with sliding windows, which then keeps all keys.
    """

    rows: tuple[RowPlan, ...] = (RowPlan(),)
    combine: Combine | None = None
    independent_passages: bool = False
    score_question: bool = False
    tracks_sentence: bool = False
    draft: Draft | None = None
    calibration: CalibrationPass | None = None
    layout: Layout | None = None
    blend: Blend | None = None
    fits_windows: bool = False

    def __post_init__(self) -> None:
        if not self.rows:
            raise PlanConflictError("a plan has 0 rows; it needs at least one")
        if len(self.rows) > 1 and self.combine is None:
            raise PlanConflictError(f"a plan has {len(self.rows)} rows and no combine; say how to merge them")
        last = [bool(row.all_passages) for row in self.rows]
        if last != sorted(last) or (all(last) and self.independent_passages):
            raise PlanConflictError(
                "all-passages rows must come last, after a row with independent passages; reorder the rows"
            )
        if self.draft is not None and self.combine is None:
            raise PlanConflictError("a plan has a draft and no combine, so its weights would have no use; give both")

    @property
    def reads_plain_prompts(self) -> bool:
        """Whether every row is a prompt that any decoder reads, and any server of the model can be sent.

        Independent passages are plain as long as a row has one of them at most.
        """
        apart = [row for row in self.rows if self.independent_passages and not row.all_passages]
        if any(row.passages is None or len(row.passages) > 1 for row in apart):
            return False
        return self.calibration is None and self.blend is None and all(row.is_plain_prompt for row in self.rows)


class Capability(StrEnum):
    """What a plan may change in a model. A mitigation names the capabilities that it needs."""

    POSITIONS = "positions"
    """Positions of tokens may be set, the same for all heads."""
    FULL_CACHE = "full_cache"
    """Every layer keeps the keys of all tokens: masks and joined passages mean what they say."""
    ROTATION = "rotation"
    """Queries and keys can be had unrotated, so that positions may differ between heads and between passages."""
    ANGLES = "angles"
    """The rotary encoding may turn by other angles: positions divided per layer, another base."""
    HIDDEN_CHANNEL = "hidden_channel"
    """Queries and keys are linear in the hidden state (no norm in between), so that one channel may be scaled."""
    SOFTMAX = "softmax"
    """Attention is the softmax of scaled scores, without soft caps and sinks, so that a method may compute its own."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and capabilities of a model.

    Attributes:
        n_layers: Decoder layers.
        n_heads: Query heads, Hq.
        n_kv_heads: Key/value heads, Hkv.
        head_dim: D.
        hidden_size: Channels of the hidden state.
        context_window: Most positions that the model was trained for.
        capabilities: What a plan may change.
        lacks: Why the other capabilities are missing, in words, where that is known.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    context_window: int
    capabilities: frozenset[Capability]
    lacks: Mapping[Capability, str] = field(default_factory=dict, hash=False)


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


Rule = Callable[[Tensor], Tensor]
"""(N,) log-probabilities of the question in the rows -> (N,) log relevance of their passages."""


def relevance_rule(source: Relevance, layout: Layout, passages: Sequence[int], cut: CutCopies | None = None) -> Rule:
    """Return the function from the rows' log-probability of the question to the log relevance of their passages.

    Args:
        passages: The passage of each row.
        cut: The copies of the question that were cut to make ``layout``.
    """
    score_on = per_device(log_relevance(layout, passages))
    neutral: Rule = (lambda question: question) if cut is None else cut.neutral(passages)

    def relevance(question: Tensor) -> Tensor:
        question = neutral(question)
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


NGRAM_TOKENS = 3
LETTER_NGRAM_TOKENS = 9
DISTINCT_SHARE = 2 / 3
COPIED_SHARE = 0.6
SIBLING_SHARE = 1 / 3
LEAST_NGRAMS = 4


class CutCopies(NamedTuple):
    """A layout without the copies of the question.

    Attributes:
        copies: The passages that held one.
        siblings: The passages that ask in the same words about something else, as entries of one FAQ do.
    """

    layout: Layout
    copies: frozenset[int]
    siblings: frozenset[int]

    def neutral(self, passages: Sequence[int]) -> Rule:
        """Return a function from the rows' log-probability of the question to one in which copies count for nothing.

        A passage that held a copy counts with the median of the others where its own is lower: without the copy it
        says too little to make the question likely, as the answer of an FAQ does. A sibling counts at most as much as
        the best such passage: its words are those of the question because it asks too, and the scores decide.

        Args:
            passages: The passage of each row.

        Shapes:
            (N,) -> (N,).
        """
        copied, asking = ([index in group for index in passages] for group in (self.copies, self.siblings))
        if not any(copied) or all(copied):
            return lambda question: question
        copied_on, asking_on = per_device(torch.tensor(copied)), per_device(torch.tensor(asking))
        rows = [[row for row, is_copy in enumerate(copied) if is_copy == wanted] for wanted in (True, False)]
        copies_on, others_on = per_device(torch.tensor(rows[0])), per_device(torch.tensor(rows[1]))

        def neutral(question: Tensor) -> Tensor:
            device = question.device
            median = question.index_select(0, others_on(device)).median()
            question = torch.where(copied_on(device), question.clamp(min=median), question)
            best = question.index_select(0, copies_on(device)).amax()
            return torch.where(asking_on(device), question.clamp(max=best), question)

        return neutral


def without_question_copies(layout: Layout) -> CutCopies | None:
    """Return the layout in which a copy of the question is no evidence for a passage; None without copies.

    A passage is a copy if |G(question) & G(passage)| > ``COPIED_SHARE`` |G(question)|, where G is the set of runs of
    ``NGRAM_TOKENS`` tokens; of ``LETTER_NGRAM_TOKENS`` if less than ``DISTINCT_SHARE`` of the question's tokens are
    distinct, because then tokens are letters or bytes, and passages share three of them by chance. The tokens of the
    shared runs are cut out of it, so that the likelihood of the question after it is that of what else it says
    (``CutCopies.neutral`` says how it counts). Its score stays: an entry of an FAQ is retrieved by its question. Where
    there is a copy, the runs are also cut out of its siblings: passages with the first run of the question, which
    holds the interrogative, and more than ``SIBLING_SHARE`` of all. A question with fewer than ``LEAST_NGRAMS`` runs
    has no copies: passages share the words of a short query because they are about it. The heading belongs to the
    passage: the title of a forum thread is the question.
    """
    question = layout.tokens(layout.question)
    size = NGRAM_TOKENS if len(set(question)) >= DISTINCT_SHARE * len(question) else LETTER_NGRAM_TOKENS
    wanted = set(_ngrams(question, size))
    if len(wanted) < LEAST_NGRAMS:
        return None
    shared = [_ngrams(layout.tokens(passage), size) for passage in layout.passages]
    shares = [len(wanted.intersection(ngrams)) / len(wanted) for ngrams in shared]
    copies = frozenset(i for i, share in enumerate(shares) if share > COPIED_SHARE)
    if not copies:
        return None
    first = question[:size]
    asking = (i for i, share in enumerate(shares) if share > SIBLING_SHARE and first in shared[i])
    siblings = frozenset(asking) - copies
    spans = [
        _spans(ngrams, wanted, layout.passages[i].start) for i, ngrams in enumerate(shared) if i in copies | siblings
    ]
    return CutCopies(layout.cut([span for each in spans for span in each]), copies, siblings)


def _spans(ngrams: Sequence[tuple[int, ...]], wanted: Set[tuple[int, ...]], start: int) -> list[Span]:
    """Return the tokens of the wanted runs, in a passage that begins at ``start``, as spans."""
    spans: list[Span] = []
    for offset, ngram in enumerate(ngrams, start):
        if ngram in wanted:
            first = spans.pop().start if spans and spans[-1].stop >= offset else offset
            spans.append(Span(first, offset + len(ngram)))
    return spans


def _ngrams(tokens: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(size)), strict=False))
