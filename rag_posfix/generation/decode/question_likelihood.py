"""How likely each passage makes the question. Knows layouts and plans; knows no method by name and no text."""

from __future__ import annotations

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.kv_lookup import KVLookup
from rag_posfix.generation.prefill.prefill import prefill
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowPlan, RowScores


@torch.inference_mode()
def question_likelihood(loaded: LoadedModel, layout: Layout, kv_lookup: KVLookup | None = None) -> tuple[float, ...]:
    """Return for each passage the mean log-probability of the question's tokens after prefix and that passage alone.

    Formula: (1 / N) sum_i log p(q_i | prefix, passage, suffix before q_i).
    Cost: prefix and passages that ``kv_lookup`` lacks are encoded once, in a batch; the suffix is read in one row per
        passage, all rows together. Where layers do not keep all keys, each row is read whole, one after another.
    """
    if not layout.n_passages:
        return ()
    rows = tuple(RowPlan(passages=(index,)) for index in range(layout.n_passages))
    plan = Plan(rows=rows, combine=_first, independent_passages=True, score_question=True)
    groups = prefill(loaded, layout, plan, kv_lookup)
    return tuple(value for group in groups for value in group.question.tolist())


def _first(scores: RowScores) -> tuple[Tensor, Tensor]:
    """A plan of several rows must say how they speak; nothing is generated from these."""
    weights = torch.zeros_like(scores.question)
    weights[0] = 1.0
    return scores.log_probs[0], weights
