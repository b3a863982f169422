"""Rows of a plan: resolved for one prompt before prefill, and read in one batch after it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch
from rag_posfix.patching.forward_context import Observer, Overrides
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import RowPlan


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedRow:
    """A row of a plan resolved for one prompt.

    Attributes:
        layout: Of the row's own tokens.
        passages: Which passages of the prompt it holds, in its order.
        positions: (1, T) float32 on the CPU: they are looked at one by one, and go to the device with the tokens.
    """

    layout: Layout
    passages: tuple[int, ...]
    positions: Tensor
    overrides: Overrides
    reusable: tuple[int, ...] = ()

    @property
    def passage_spans(self) -> list[tuple[int, Span]]:
        """Each passage of the prompt that the row holds, and its span in the row."""
        return list(zip(self.passages, self.layout.passages, strict=True))


def resolve(row: RowPlan, layout: Layout, device: torch.device) -> ResolvedRow:
    passages = tuple(range(layout.n_passages)) if row.passages is None else row.passages
    seen = layout if row.passages is None else layout.select(passages)
    positions = row.positions
    if positions is None:
        positions = torch.arange(len(seen.token_ids), dtype=torch.float32)[None]
    overrides = Overrides(
        mask=row.mask,
        rope_base_factor=row.rope_base_factor,
        layer_scale=None if row.layer_scale is None else tuple(row.layer_scale.tolist()),
        head_scale=row.head_scale,
        hidden_scale=row.hidden_scale,
        attend=None if row.attend is None else row.attend.on(device),
    )
    return ResolvedRow(seen, passages, positions, overrides, row.reusable)


def passage_starts(rows: Sequence[ResolvedRow], passage: int) -> set[float]:
    """Return the first position of a passage of the prompt in each row that holds it."""
    return {
        float(row.positions[0, span.start])
        for row in rows
        for held, span in row.passage_spans
        if held == passage and len(span)
    }


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledGroup:
    """Rows of a plan that were read in one batch, ready to decode.

    Attributes:
        logits: (R, V) of the next token.
        question: (R,) mean log-probability of the question's tokens, zeros if not requested.
        passage_attention: (R, N) attention of the last token to each passage, averaged over layers and heads.
        passage_shares: (R, N) the same as shares of the attention to passages; rows sum to 1 or are 0.
            Without the attention hook 1 for the passage of a row that has a single one.
        cached_tokens: Tokens of the prompt whose keys and values were in the store.
    """

    batch: SequenceBatch
    logits: Tensor
    question: Tensor
    passage_attention: Tensor
    passage_shares: Tensor
    cached_tokens: int = 0


SCORES_AT_ONCE = 1 << 28
"""Logits of all rows that are held at the same time: 512 MiB in 16 bits."""


def scored_question(layout: Layout) -> Span:
    """Return the question's tokens that are scored: not the one that follows what is read in a pass of its own."""
    apart = (layout.turn_starts or (layout.suffix.start,))[-1]
    stop = layout.question.stop
    return Span(min(max(layout.question.start, apart + 1), stop), stop)


def logits_to_keep(layout: Layout, score_question: bool) -> int:
    """Return how many trailing logits are needed: those that predict the question's tokens, or the last alone."""
    asked = scored_question(layout)
    if not score_question or layout.question.start == 0 or not len(asked):
        return 1
    return len(layout.token_ids) - asked.start + 1


def logits_at_once(loaded: LoadedModel, n_rows: int) -> int:
    """Return of how many tokens the logits of all rows may be held at the same time."""
    return max(1, SCORES_AT_ONCE // (n_rows * int(loaded.model.config.get_text_config().vocab_size)))


def read_question(
    batch: SequenceBatch,
    token_ids: Tensor,
    positions: Tensor,
    layout: Layout,
    keep: int,
    observer: Observer,
    *,
    in_parts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Append the last tokens of a prompt to every row, and score the question unless ``keep`` is 1.

    Args:
        keep: As ``logits_to_keep`` says.
        in_parts: Whether a long question may be read in several passes. They end at the same tokens, whatever the
            store holds.

    Shapes:
        token_ids: (R, Tq). positions: (R, Tq) float32.
        returns: (R, V) of the next token; (R,) mean log-probability of the question's tokens, zeros if not scored.
    """
    n_rows, n_tokens = token_ids.shape
    means = torch.zeros(n_rows, device=batch.loaded.device)
    step = logits_at_once(batch.loaded, n_rows)
    if keep == 1:
        return batch.forward(token_ids, positions, 1, observer)[:, -1], means
    target = torch.tensor(layout.tokens(scored_question(layout)), device=batch.loaded.device)
    if keep <= step or not in_parts:
        logits = batch.forward(token_ids, positions, keep, observer)
        for r in range(n_rows):
            means[r] = _log_probs(logits[r], target).mean()
        return logits[:, -1], means
    first = n_tokens - keep
    ends = [*range(first + step, first + len(target), step), first + len(target)]
    parts: list[list[Tensor]] = [[] for _ in range(n_rows)]
    for start, stop in itertools.pairwise((0, *ends)):
        kept_from = max(start, first)
        ids, places = token_ids[:, start:stop], positions[:, start:stop]
        logits = batch.forward(ids, places, stop - kept_from, ends_prompt=False)
        for r in range(n_rows):
            parts[r].append(_log_probs(logits[r], target[kept_from - first : stop - first]))
    for r in range(n_rows):
        means[r] = torch.cat(parts[r]).mean()
    return batch.forward(token_ids[:, ends[-1] :], positions[:, ends[-1] :], 1, observer)[:, -1], means


def _log_probs(logits: Tensor, target: Tensor) -> Tensor:
    """Return the log-probabilities of a row's tokens, (T, 1); row by row, for (T, V) in float32 is large."""
    return logits[: len(target)].float().log_softmax(dim=-1).gather(1, target[:, None])


def prefilled_group(
    batch: SequenceBatch,
    read: tuple[Tensor, Tensor],
    layout: Layout,
    rows: Sequence[ResolvedRow],
    observer: Observer,
    cached_tokens: int = 0,
) -> PrefilledGroup:
    """Return the result of a prefill whose last passes were ``read_question`` and had the ``observer``."""
    logits, question = read
    spans = tuple(
        tuple((passage, start + span.start, start + span.stop) for passage, span in row.passage_spans)
        for row, start in zip(rows, batch.row_starts, strict=True)
    )
    attention = torch.zeros((len(rows), layout.n_passages), device=logits.device)
    attended = observer.mean()
    if attended is not None:
        attended = batch.loaded.spec.ranks.mean(attended)
        for r, row_spans in enumerate(spans):
            sums: dict[int, Tensor] = {}
            for passage, start, stop in row_spans:
                mass = attended[r, start:stop].sum()
                sums[passage] = mass if passage not in sums else sums[passage] + mass  # a row may repeat a passage
            for passage, mass in sums.items():
                attention[r, passage] = mass
    total = attention.sum(dim=1, keepdim=True)
    shares = attention / total.where(total > 0, 1.0)
    if attended is None:  # the model runs without the attention hook; the share of a single passage is 1 all the same
        for r, row_spans in enumerate(spans):
            if len({passage for passage, _, _ in row_spans}) == 1:
                shares[r, row_spans[0][0]] = 1.0
    return PrefilledGroup(
        replace(batch, passage_spans=spans),
        logits,
        question,
        attention,
        shares,
        cached_tokens,
    )
