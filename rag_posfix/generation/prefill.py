"""Reads a prompt under a plan: row by row as it stands, or passage by passage where passages are independent.

Knows plans, layouts and rows; knows no method by name, no text and no sampling.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rag_posfix.attention.plan import Plan, RowPlan
from rag_posfix.attention.spans import Layout
from rag_posfix.generation.blended import read_blended
from rag_posfix.generation.by_passage import joinable, read_by_passage
from rag_posfix.generation.encode import Stretch, cut_out, join
from rag_posfix.generation.forward import LoadedModel, Rows, new_cache
from rag_posfix.generation.reuse import Reuse, Wanted
from rag_posfix.generation.rows_of_plan import PrefilledGroup, Spelled, group_of, logits_to_keep, spell_out
from rag_posfix.patching.call import Observer

__all__ = ["PrefilledGroup", "prefill", "read_on"]


def prefill(loaded: LoadedModel, layout: Layout, plan: Plan, reuse: Reuse | None = None) -> list[PrefilledGroup]:
    """Read the prompt and return groups of rows; the rows of all groups, in order, are the plan's rows.

    Cost: plans with independent passages encode prefix and passages once, in batches, and join them; other plans read
    each row as one sequence. What ``reuse`` holds is not read again.
    """
    rows = [spell_out(row, layout, loaded.device) for row in plan.rows]
    if plan.blend is not None and layout.n_passages and loaded.keeps_all_keys:
        return [read_blended(loaded, layout, rows[0], plan.blend, reuse)]
    if plan.independent_passages and layout.n_passages and loaded.keeps_all_keys and joinable(rows):
        return [read_by_passage(loaded, layout, rows, plan.score_question, reuse)]
    return [_read_whole(loaded, layout, row, plan.score_question, reuse) for row in rows]


def read_on(loaded: LoadedModel, layout: Layout, row: RowPlan, before: Rows) -> PrefilledGroup:
    """Read what is left of a prompt as ``row`` asks, after rows that hold its first tokens."""
    spelled = spell_out(row, layout, loaded.device)
    before.edits = spelled.edits
    return _read_rest(loaded, layout, spelled, before, 1)


def _read_whole(
    loaded: LoadedModel, layout: Layout, row: Spelled, score_question: bool, reuse: Reuse | None
) -> PrefilledGroup:
    """Read one row as one sequence, after as many of its leading tokens as are found.

    With ``reuse``, each reusable stretch is read in a pass of its own, found or not found: then what is computed
    from it is the same to the last bit.
    """
    keep = logits_to_keep(row.layout, score_question)
    empty = Rows(loaded, new_cache(loaded), row.positions[:, :0], edits=row.edits)
    if reuse is None or not row.reusable or not loaded.keeps_all_keys:
        return _read_rest(loaded, layout, row, empty, keep)
    leading, part = _leading(row), reuse.leading(row.edits)
    found = [*reuse.find(loaded, part, leading), None]
    held = [states for states in found[: found.index(None)] if states is not None]
    before, cached = empty, 0
    if held:
        cached = row.reusable[len(held) - 1]
        room = len(row.layout.token_ids) - cached
        before = join(loaded, [held], [row.positions[:, :cached]], room, row.edits)
    new = leading[len(held) :]
    for wanted in new if row.edits.attend is None else ():
        ids = torch.tensor([wanted.stretch.token_ids], device=loaded.device)
        before.forward(ids, wanted.stretch.positions[None], keep=1)
    before.n_prompt = 0  # the prompt is not read yet
    group = _read_rest(loaded, layout, row, before, keep, cached)
    bounds = list(itertools.pairwise((0, *row.reusable)))[len(held) :]
    reuse.keep(part, [(one, cut_out(group.rows, *span)) for one, span in zip(new, bounds, strict=True)])
    return group


def _leading(row: Spelled) -> list[Wanted]:
    """Return the row's reusable stretches, each after those before it and tagged by all passages that went into it."""
    bounds = list(itertools.pairwise((0, *row.reusable)))
    stretches = [Stretch(row.layout.token_ids[a:b], row.positions[0, a:b]) for a, b in bounds]
    tags = [
        tuple(key for key, span in zip(row.layout.keys, row.layout.passages, strict=True) if span.start < b)
        for _, b in bounds
    ]
    return [Wanted(one, tuple(stretches[:i]), tags[i]) for i, one in enumerate(stretches)]


def _read_rest(
    loaded: LoadedModel, layout: Layout, row: Spelled, before: Rows, keep: int, cached: int = 0
) -> PrefilledGroup:
    """Read the tokens of a row that ``before`` does not hold yet."""
    start = before.length
    observer = Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    logits: Tensor = before.forward(ids, row.positions[:, start:], keep, observer)
    return group_of(before, logits, layout, [row], observer, cached)
