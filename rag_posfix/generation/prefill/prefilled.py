"""The result of prefill: a batch that has read its prompts, and what the model says after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import SequenceBatch
from rag_posfix.generation.prefill.resolved_row import ResolvedRow
from rag_posfix.patching.forward_context import Observer
from rag_posfix.plan.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledGroup:
    """Rows of a plan that were read in one batch, and what they say of the next token.

    Attributes:
        batch: The rows, ready to decode.
        logits: (R, K, V): the last is that of the next token; the others are those of the question, if asked for.
        question: (R,) mean log-probability of the question's tokens, zeros if not asked for.
        passage_attention: (R, N) attention of the last token to each passage, averaged over layers and heads.
        passage_shares: (R, N) the same as shares of the attention to passages; rows sum to 1 or are 0.
        cached_tokens: Tokens of the prompt whose keys and values were found, not computed.
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
    """Return the result of a prefill.

    Args:
        batch: Has read the rows.
        logits: Of its last pass, see ``logits_to_keep``.
        observer: Has seen the attention of the last token.
        cached_tokens: Tokens that were found, not computed.
    """
    spans = tuple(
        tuple((passage, start + span.start, start + span.stop) for passage, span in row.passage_spans)
        for row, start in zip(rows, batch.row_starts, strict=True)
    )
    attention = torch.zeros((len(rows), layout.n_passages), device=logits.device)
    attended = observer.mean()
    if attended is not None:
        attended = batch.loaded.spec.ranks.mean(attended)
        for r, held in enumerate(spans):
            for passage, start, stop in held:
                attention[r, passage] = attended[r, start:stop].sum()
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
    """Return the mean log-probability of the question's tokens in each row, (R,); zeros where it was not asked for."""
    found = torch.zeros(logits.shape[0], device=logits.device)
    if logits.shape[1] > 1:
        target = torch.tensor(layout.tokens(layout.question), device=logits.device)
        for r in range(logits.shape[0]):  # row by row: (question, V) in float32 is large
            log_probs = logits[r, : len(target)].float().log_softmax(dim=-1)
            found[r] = log_probs.gather(1, target[:, None]).mean() if len(target) else 0.0
    return found
