"""Scores of passages by a question, and of candidate answers by rows, whatever the method.

Of a passage: the attention of the question to it, and the likelihood of the question after it. Candidate answers: each
row of a plan writes a short answer alone, and each row scores every answer.

Token attribution: which passages each token of an answer comes from, tracked while it is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, GenerationError
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, forward_batches
from rag_posfix.generation.prefill.per_passage import KVLookup
from rag_posfix.generation.prefill.prefill import prefill, prefill_context
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import CandidateAnswers, ModelShape, Plan, RowPlan, RowScores


def not_finite_error(score: float) -> GenerationError:
    """Return the error of a score that is not finite."""
    return GenerationError(
        f"the model's scores are not finite (the largest is {score}), as where float16 overflows; use "
        "dtype='bfloat16' or 'float32' (RAG_POSFIX_DTYPE), or check the weights"
    )


def check_finite(score: float) -> float:
    """Return a log-probability, which may be -inf; where an activation overflows, all scores of a token are NaN."""
    if math.isnan(score) or score == math.inf:
        raise not_finite_error(score)
    return score


@torch.inference_mode()
def question_attention(
    loaded: LoadedModel,
    layouts: Sequence[Layout],
    kv_lookup: KVLookup | None = None,
    check: Callable[[], None] | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[tuple[int, int]] | None = None,
) -> list[tuple[tuple[float, ...], ...]]:
    """Return for each prompt, passage and token the attention that the prompt's suffix pays to it.

    Formula: s_i = sum over the layers and all heads, or over ``heads``, of the mean over the suffix's tokens t of
        A(t, i).
    Cost: prefix and passages are read once, then each suffix. Layers after the last one that counts do not run, except
        for what the store keeps. Of each layer's attention only the suffix's rows are materialised. Where layers do
        not keep all keys (sliding windows), each prompt is read whole.

    Args:
        check: Called before each suffix is read; what it raises ends the reading.
        layers: Which layers count, from 0; all if None.
        heads: Which query heads count, as (layer, head) from 0, in place of ``layers``; all if None.

    Raises:
        ConfigError: the prompts differ in more than their suffix, or the model has no such layer or head.
    """
    shape = loaded.spec.shape
    if layers is not None and not (layers and all(0 <= layer < shape.n_layers for layer in layers)):
        raise ConfigError(
            f"layers={sorted(layers)} must name one or more of the model's layers, 0 to {shape.n_layers - 1}"
        )
    by_layer = None if heads is None else _group_by_layer(heads, shape)
    leading = {layout.token_ids[: layout.suffix.start] for layout in layouts}
    if len(leading) > 1 or len({layout.passages for layout in layouts}) > 1:
        raise ConfigError(
            f"{len(layouts)} prompts differ before their suffix; give prompts with the same prefix and passages"
        )
    last = max(by_layer or layers or [shape.n_layers - 1])
    before = prefill_context(loaded, layouts[0], kv_lookup, last) if layouts and loaded.keeps_all_keys else None
    scores = []
    for layout in layouts:
        if check is not None:
            check()
        attended = _suffix_attention(loaded, layout, before, layers, by_layer)
        check_finite(float(attended.sum()))
        scores.append(tuple(tuple(attended[span.slice].tolist()) for span in layout.passages))
    return scores


@torch.inference_mode()
def question_attention_by_head(loaded: LoadedModel, layouts: Sequence[Layout]) -> list[Tensor]:
    """Return for each prompt the attention that its suffix pays to each token, by layer and head.

    (L, Hq, T) float32 on the CPU for each prompt, T with its suffix, averaged over the tokens of the suffix.

    Cost: as ``question_attention``, and (L, Hq, T) numbers per prompt.
    """
    shape = loaded.spec.shape
    heads = {layer: tuple(range(shape.n_heads)) for layer in range(shape.n_layers)}
    last = shape.n_layers - 1
    before = prefill_context(loaded, layouts[0], None, last) if layouts and loaded.keeps_all_keys else None
    attention = []
    for layout in layouts:
        observer = Observer(queries=len(layout.suffix), heads=heads)
        _read_suffix(loaded, layout, before, observer, last)
        attention.append(torch.stack([observer.by_head[layer][0].float().cpu() for layer in heads]))
    return attention


def _group_by_layer(heads: Collection[tuple[int, int]], shape: ModelShape) -> dict[int, tuple[int, ...]]:
    """Return the heads of each layer."""
    if not heads or not all(0 <= layer < shape.n_layers and 0 <= head < shape.n_heads for layer, head in heads):
        raise ConfigError(
            f"heads={sorted(heads)} must name one or more heads as (layer, head), layers 0 to {shape.n_layers - 1}, "
            f"heads 0 to {shape.n_heads - 1}"
        )
    by_layer: dict[int, tuple[int, ...]] = {}
    for layer, head in sorted(set(heads)):
        by_layer[layer] = (*by_layer.get(layer, ()), head)
    return by_layer


def _read_suffix(
    loaded: LoadedModel, layout: Layout, before: SequenceBatch | None, observer: Observer, last_layer: int
) -> None:
    """Read what ``before`` does not hold of a prompt, up to the last layer that counts."""
    if before is None:
        start, batch = 0, SequenceBatch.empty(loaded)
    else:
        start, batch = layout.suffix.start, before.branch()
    ids = torch.tensor([layout.token_ids[start:]], device=loaded.device)
    positions = torch.arange(start, len(layout.token_ids), dtype=torch.float32)
    batch.prefill_layers(ids, positions[None], last_layer, observer)


def _suffix_attention(
    loaded: LoadedModel,
    layout: Layout,
    before: SequenceBatch | None,
    layers: Collection[int] | None,
    heads: dict[int, tuple[int, ...]] | None,
) -> Tensor:
    """Return the attention to every token, (T,) float32 on the CPU."""
    counted = None if layers is None else frozenset(layers)
    observer = Observer(queries=len(layout.suffix), layers=counted, heads=heads)
    _read_suffix(loaded, layout, before, observer, max(heads or layers or [loaded.spec.shape.n_layers - 1]))
    if heads is not None:
        return torch.stack([attended[0].sum(dim=0).float().cpu() for attended in observer.by_head.values()]).sum(dim=0)
    if observer.total is None:
        raise ConfigError("no layer of the model reported its attention; load it with rag_posfix.load_engine")
    total: Tensor = observer.total[0] * loaded.spec.shape.n_heads  # the observer averages over heads
    return total.float().cpu()


@torch.inference_mode()
def question_likelihood(
    loaded: LoadedModel, layout: Layout, kv_lookup: KVLookup | None = None, *, bare: bool = False
) -> tuple[float, ...]:
    """Return for each passage the mean log-probability of the question's tokens after prefix and that passage alone.

    With ``bare`` the last value is that of the question without a passage.

    Formula: (1 / N) sum_i log p(q_i | prefix, passage, suffix before q_i).
    Cost: prefix and passages that ``kv_lookup`` lacks are encoded once, in a batch; the suffix is read in one row per
        passage, all rows together. Where layers do not keep all keys, each row is read whole, one after another.
    """
    if not layout.n_passages:
        return ()
    rows = tuple(RowPlan(passages=(index,)) for index in range(layout.n_passages))
    rows += (RowPlan(passages=()),) if bare else ()
    plan = Plan(rows=rows, combine=_take_first_row, independent_passages=True, score_question=True)
    groups = prefill(loaded, layout, plan, kv_lookup)
    return tuple(check_finite(value) for group in groups for value in group.question.tolist())


@torch.inference_mode()
def first_token_log_probs(
    loaded: LoadedModel, layout: Layout, tokens: Sequence[int], kv_lookup: KVLookup | None = None
) -> list[tuple[float, ...]]:
    """Return the log-probability of each of ``tokens`` as the first token of the answer, (N + 1, len(tokens)).

    Row k has passage k alone, the last row has no passage. Cost: as ``question_likelihood``, and one suffix more.
    """
    rows = (*(RowPlan(passages=(index,)) for index in range(layout.n_passages)), RowPlan(passages=()))
    plan = Plan(rows=rows, combine=_take_first_row, independent_passages=True)
    logits = [group.logits for group in prefill(loaded, layout, plan, kv_lookup)]
    log_probs = torch.cat([each.float().log_softmax(dim=-1)[:, list(tokens)] for each in logits])
    return [tuple(map(check_finite, row)) for row in log_probs.tolist()]


def _take_first_row(scores: RowScores) -> tuple[Tensor, Tensor]:
    """Combine rows that generate nothing: a plan of several rows needs a combination."""
    weights = torch.zeros_like(scores.question)
    weights[0] = 1.0
    return scores.log_probs[0], weights


@dataclass(frozen=True, slots=True)
class AnswerText:
    """How tokens of an answer are read: which of them end it, and their text.

    Attributes:
        eos_ids: Tokens that end an answer.
        decode: Tokens to text; None where there is no text, then answers are equal if their tokens are.
    """

    eos_ids: frozenset[int] = frozenset()
    decode: Callable[[Sequence[int]], str] | None = None

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Return whether a short answer is over: its first line is complete."""
        return self.decode is not None and "\n" in self.decode(token_ids).lstrip()

    def key(self, token_ids: Sequence[int]) -> str | tuple[int, ...]:
        """Return a key that equal answers share: their words, without case, spaces and the final stop."""
        if self.decode is None:
            return tuple(token_ids)
        return " ".join(self.decode(token_ids).casefold().split()).rstrip(" .")


@torch.inference_mode()
def write_candidates(
    batches: Sequence[SequenceBatch], log_probs: Tensor, question: Tensor, max_tokens: int, text: AnswerText
) -> CandidateAnswers:
    """Return one greedy answer per row and its log-probability in every row.

    Cost: at most ``max_tokens`` steps of all rows, and one pass of all rows over each distinct answer.

    Shapes:
        log_probs: (R, V) of the next token after the prompt. question: (R,) log-probability of the question.
    """
    answers = _write(batches, log_probs, max_tokens, text)
    keys = [text.key(answer) for answer in answers]
    distinct = list(dict.fromkeys(answers))
    longest = max(map(len, distinct))
    padded = [(*answer, *(0,) * (longest - len(answer))) for answer in distinct]
    ids = torch.tensor(padded, dtype=torch.long, device=log_probs.device)  # one upload for all
    scored = {
        answer: _score(batches, log_probs, row[: len(answer)]) for answer, row in zip(distinct, ids, strict=True)
    }
    return CandidateAnswers(
        tokens=tuple(answers),
        log_probs=torch.stack([scored[answer] for answer in answers]),
        same=torch.tensor([[a == b for b in keys] for a in keys], device=log_probs.device),
        question=question,
    )


def _write(
    batches: Sequence[SequenceBatch], log_probs: Tensor, max_tokens: int, text: AnswerText
) -> list[tuple[int, ...]]:
    """Return each row's greedy answer, without what ends it."""
    running = [batch.branch() for batch in batches]
    answers: list[list[int]] = [[] for _ in log_probs]
    open_rows = set(range(len(answers)))
    for step in range(max_tokens):
        likeliest = batches[0].loaded.spec.ranks.broadcast_decision(log_probs.argmax(dim=-1))
        tokens: list[int] = likeliest.tolist()
        for row in sorted(open_rows):
            if tokens[row] not in text.eos_ids:
                answers[row].append(tokens[row])
            if tokens[row] in text.eos_ids or text.is_complete(answers[row]):
                open_rows.discard(row)
        if not open_rows or step + 1 == max_tokens:
            break
        log_probs = _step(running, likeliest[:, None])[:, -1]
    return [tuple(answer) for answer in answers]


def _score(batches: Sequence[SequenceBatch], log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the summed log-probability of one answer, (n,), in every row, (R,)."""
    if not len(ids):
        return log_probs.new_zeros(log_probs.shape[0])
    steps = log_probs[:, None]  # (R, 1, V)
    if len(ids) > 1:
        appended = ids[:-1].expand(log_probs.shape[0], -1)
        steps = torch.cat((steps, _step([batch.branch() for batch in batches], appended)), dim=1)  # (R, n, V)
    return steps.gather(2, ids[None, :, None].expand(steps.shape[0], -1, 1)).sum(dim=(1, 2))


def _step(batches: Sequence[SequenceBatch], tokens: Tensor) -> Tensor:
    """Append each row's own tokens and return the log-probabilities after each of them, (R, n, V) float32."""
    ids = torch.split(tokens, [batch.n_rows for batch in batches])
    return torch.cat(forward_batches(batches, ids, tokens.shape[1])).float().log_softmax(dim=-1)


LAYERS = 4


def attribution_layers(n_layers: int) -> frozenset[int]:
    """Return the layers whose attention is tracked: four, evenly through the upper half.

    All of them would cost an eighth of a decode step and more; the lower half looks at neighbours mostly.
    """
    upper = n_layers - n_layers // 2
    count = min(LAYERS, upper)
    return frozenset(n_layers // 2 + index * upper // count for index in range(count))


class AttributionTracker:
    """Tracks the shares of the passages in each token that one session generates.

    Rows that hold one passage each need no attention: their weights in the plan are the shares.

    ``attention`` (R, N) is the passages' shares in the attention of the prompt's last token, row by row.
    """

    def __init__(self, batches: Sequence[SequenceBatch], attention: Tensor) -> None:
        self._batches = list(batches)
        self._current = attention
        self._weights: Tensor | None = None
        self._shares: list[Tensor] = []
        self._segments = [_segments(batch, attention.shape[1]) for batch in self._batches]
        self._layers = attribution_layers(self._batches[0].loaded.spec.shape.n_layers)

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next forward pass, for each group."""
        return [
            None if segments is None else Observer(layers=self._layers, approximate=True)
            for segments in self._segments
        ]

    def weigh_rows(self, weights: Tensor) -> None:
        """Set the (R,) weights with which the rows choose the next token; the last call before ``take`` counts."""
        self._weights = weights

    def take(self, observers: Sequence[Observer | None]) -> None:
        """Count the token that was chosen, and take the attention of the pass that read it from its ``observers()``.

        Without observers the shares stay as they are.
        """
        self._count()
        if not observers:
            return
        counts = [batch.n_rows for batch in self._batches]
        current = list(torch.split(self._current, counts))
        for index, (segments, observer) in enumerate(zip(self._segments, observers, strict=True)):
            attended = None if observer is None else observer.mean()
            if segments is not None and attended is not None:
                current[index] = _shares(attended, segments, self._current.shape[1])
        self._current = torch.cat(current)

    def shares(self) -> list[tuple[float, ...]]:
        """Return the shares of every token, the last one included."""
        self._count()
        if not self._shares:
            return []
        return [tuple(row) for row in torch.stack(self._shares).tolist()]

    def _count(self) -> None:
        if self._weights is not None:
            self._shares.append((self._weights[:, None] * self._current).sum(dim=0))
            self._weights = None


def can_attribute(batches: Sequence[SequenceBatch]) -> bool:
    """Return whether these rows' tokens can be attributed to passages.

    Not where a model is split over processes, each of which sees its own heads only, nor where a layer forgets keys.
    """
    return all(
        batch.loaded.spec.ranks.count == 1 and (batch.loaded.keeps_all_keys or holds_one_each(batch))
        for batch in batches
    )


def holds_one_each(batch: SequenceBatch) -> bool:
    """Return whether no row holds two passages: then no attention need be looked at."""
    return all(len(held) < 2 for held in batch.passage_spans)


def _segments(batch: SequenceBatch, n_passages: int) -> Tensor | None:
    """Return each cached token's passage, (R, length), N outside of passages; None if no row holds two passages."""
    if holds_one_each(batch):
        return None
    segments = torch.full((batch.n_rows, batch.length), n_passages, dtype=torch.long)
    for row, held in enumerate(batch.passage_spans):
        for passage, start, stop in held:
            segments[row, start:stop] = passage
    return segments.to(batch.positions.device)


def _shares(attended: Tensor, segments: Tensor, n_passages: int) -> Tensor:
    """Return (R, N) shares from the attention to all tokens, (R, Tk); generated ones come last and do not count."""
    mass = attended.new_zeros((attended.shape[0], n_passages + 1))
    mass.scatter_add_(1, segments, attended[:, : segments.shape[1]])
    total = mass[:, :-1].sum(dim=1, keepdim=True)
    return mass[:, :-1] / total.where(total > 0, 1.0)
