"""A row of a plan spelled out for one prompt: what it reads, where, and what it asks of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import Rows
from rag_posfix.patching.call import Edits, Observer
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import RowPlan

__all__ = ["PrefilledGroup", "Spelled", "group_of", "logits_to_keep", "spell_out", "starts_of"]


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledGroup:
    """Rows that were read, and what they say of the next token.

    Attributes:
        rows: The rows, ready to decode.
        logits: (R, K, V): the last is that of the next token; the others are those of the question, if asked for.
        question: (R,) mean log-probability of the question's tokens, zeros if not asked for.
        mass: (R, N) attention of the last token to each passage of the prompt, averaged over layers and heads.
        attention: (R, N) the same as shares of the attention to passages; rows sum to 1 or are 0.
        cached_tokens: Tokens of the prompt whose keys and values were not computed but found.
    """

    rows: Rows
    logits: Tensor
    question: Tensor
    mass: Tensor
    attention: Tensor
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Spelled:
    """A row of a plan with the layout of what it sees, its positions, and what it asks of the model.

    Attributes:
        layout: Of the row's own tokens.
        passages: Which passages of the prompt it holds, in its order.
        positions: (1, T) float32.
        edits: What it asks of the model.
        reusable: As in ``RowPlan``.
    """

    layout: Layout
    passages: tuple[int, ...]
    positions: Tensor
    edits: Edits
    reusable: tuple[int, ...] = ()

    @property
    def placed(self) -> list[tuple[int, Span]]:
        """Each passage of the prompt that the row holds, and where it stands in the row."""
        return list(zip(self.passages, self.layout.passages, strict=True))


def spell_out(row: RowPlan, layout: Layout, device: torch.device) -> Spelled:
    """Return a row of a plan for one prompt."""
    passages = tuple(range(layout.n_passages)) if row.passages is None else row.passages
    seen = layout if row.passages is None else layout.select(passages)
    positions = row.positions
    if positions is None:
        positions = torch.arange(len(seen.token_ids), dtype=torch.float32)[None]
    edits = Edits(
        mask=row.mask,
        rope_base_factor=row.rope_base_factor,
        layer_scale=None if row.layer_scale is None else tuple(row.layer_scale.tolist()),
        head_scale=row.head_scale,
        hidden_scale=row.hidden_scale,
        attend=row.attend,
    )
    return Spelled(seen, passages, positions.to(device), edits, row.reusable)


def starts_of(rows: Sequence[Spelled], passage: int) -> set[float]:
    """Return the first position of a passage of the prompt in each row that holds it."""
    return {
        float(row.positions[0, span.start])
        for row in rows
        for held, span in row.placed
        if held == passage and len(span)
    }


def logits_to_keep(layout: Layout, score_question: bool) -> int:
    """Return how many trailing logits are needed: those that predict the question's tokens, or the last alone."""
    if not score_question or layout.question.start == 0:
        return 1
    return len(layout.token_ids) - layout.question.start + 1


def group_of(
    rows: Rows, logits: Tensor, layout: Layout, read: Sequence[Spelled], observer: Observer, cached_tokens: int = 0
) -> PrefilledGroup:
    """Return rows that have read a prompt, with what was seen on the way."""
    question = torch.zeros(len(read), device=logits.device)
    if logits.shape[1] > 1:
        target = torch.tensor(layout.tokens(layout.question), device=logits.device)
        for r in range(len(read)):  # row by row: (question, V) in float32 is large
            said = logits[r, : len(target)].float().log_softmax(dim=-1)
            question[r] = said.gather(1, target[:, None]).mean() if len(target) else 0.0
    mass = torch.zeros((len(read), layout.n_passages), device=logits.device)
    attended = observer.mean()
    if attended is not None:
        attended = rows.loaded.spec.ranks.mean(attended)
        for r, (row, start) in enumerate(zip(read, rows.first_tokens, strict=True)):
            for passage, span in row.placed:
                mass[r, passage] = attended[r, start + span.start : start + span.stop].sum()
    rows.placed = tuple(
        tuple((passage, start + span.start, start + span.stop) for passage, span in row.placed)
        for row, start in zip(read, rows.first_tokens, strict=True)
    )
    total = mass.sum(dim=1, keepdim=True)
    return PrefilledGroup(rows, logits, question, mass, mass / total.where(total > 0, 1.0), cached_tokens)
