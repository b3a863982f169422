"""Rows of a plan: resolved for one prompt before prefill, and read in one batch after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import SequenceBatch
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
        logits: (R, K, V): of the question's tokens, if requested, then of the next token.
        question: (R,) mean log-probability of the question's tokens, zeros if not requested.
        passage_attention: (R, N) attention of the last token to each passage, averaged over layers and heads.
        passage_shares: (R, N) the same as shares of the attention to passages; rows sum to 1 or are 0.
        cached_tokens: Tokens of the prompt whose keys and values were in the store.
    """

    batch: SequenceBatch
    logits: Tensor
    question: Tensor
    passage_attention: Tensor
    passage_shares: Tensor
    cached_tokens: int = 0


def logits_to_keep(layout: Layout, score_question: bool) -> int:
    """Return how many trailing logits are needed: those that predict the question's tokens, or the last alone."""
    if not score_question or layout.question.start == 0:
        return 1
    return len(layout.token_ids) - layout.question.start + 1


def prefilled_group(
    batch: SequenceBatch,
    logits: Tensor,
    layout: Layout,
    rows: Sequence[ResolvedRow],
    observer: Observer,
    cached_tokens: int = 0,
) -> PrefilledGroup:
    """Return the result of a prefill whose last pass had ``logits`` (see ``logits_to_keep``) and the ``observer``."""
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
    return PrefilledGroup(
        replace(batch, passage_spans=spans),
        logits,
        _question_log_probs(logits, layout),
        attention,
        attention / total.where(total > 0, 1.0),
        cached_tokens,
    )


def _question_log_probs(logits: Tensor, layout: Layout) -> Tensor:
    """Return the mean log-probability of the question's tokens in each row, (R,); zeros where it was not requested."""
    means = torch.zeros(logits.shape[0], device=logits.device)
    if logits.shape[1] > 1:
        target = torch.tensor(layout.tokens(layout.question), device=logits.device)
        for r in range(logits.shape[0]):  # row by row: (question, V) in float32 is large
            log_probs = logits[r, : len(target)].float().log_softmax(dim=-1)
            means[r] = log_probs.gather(1, target[:, None]).mean() if len(target) else 0.0
    return means
