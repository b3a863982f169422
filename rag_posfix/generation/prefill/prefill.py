"""Reads a prompt under a plan: row by row as it stands, or passage by passage where passages are independent.

Knows plans, layouts and rows; knows no method by name, no text and no sampling.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import LoadedModel, Rows, new_cache
from rag_posfix.generation.prefill.cache_blend import read_blended
from rag_posfix.generation.prefill.encode import Stretch, cut_out, join
from rag_posfix.generation.prefill.kv_reuse import Reuse, Wanted
from rag_posfix.generation.prefill.per_passage import joinable, read_by_passage
from rag_posfix.generation.prefill.resolved_row import PrefilledGroup, Spelled, group_of, logits_to_keep, spell_out
from rag_posfix.patching.call import Observer
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowPlan

__all__ = ["PrefilledGroup", "prefill", "read_leading", "read_on"]


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


def read_leading(loaded: LoadedModel, layout: Layout, reuse: Reuse | None = None) -> Rows:
    """Read prefix and passages of a prompt as the model was trained to, and return rows that any suffix may follow.

    For models whose every layer keeps all keys. Shares what ``reuse`` holds with prompts that are read whole.
    """
    row = spell_out(RowPlan(reusable=layout.boundaries), layout, loaded.device)
    if reuse is not None and row.reusable:
        led = _Led(loaded, row, reuse)
        led.read_missing()
        led.keep(led.rows)
        return led.rows
    rows = Rows(loaded, new_cache(loaded), row.positions[:, :0])
    leading = layout.token_ids[: layout.suffix.start]
    if leading:
        rows.forward(torch.tensor([leading], device=loaded.device), row.positions[:, : len(leading)], keep=1)
        rows.n_prompt = 0  # the prompt is not read yet
    return rows


class _Led:
    """The leading tokens of a row: those that are found, and those that are missing.

    Attributes:
        rows: Hold what was found, and what ``read_missing`` has read.
        cached: How many tokens were found.
    """

    def __init__(self, loaded: LoadedModel, row: Spelled, reuse: Reuse) -> None:
        self._reuse, self._row = reuse, row
        self._part, leading = reuse.leading(row.edits), _leading(row)
        found = [*reuse.find(loaded, self._part, leading), None]
        held = [states for states in found[: found.index(None)] if states is not None]
        self._missing = leading[len(held) :]
        self.cached = row.reusable[len(held) - 1] if held else 0
        self.rows = Rows(loaded, new_cache(loaded), row.positions[:, :0], edits=row.edits)
        if held:
            room = len(row.layout.token_ids) - self.cached
            self.rows = join(loaded, [held], [row.positions[:, : self.cached]], room, row.edits)

    def read_missing(self) -> None:
        """Read each missing stretch in a pass of its own, as it would be had those before it been found."""
        for wanted in self._missing:
            ids = torch.tensor([wanted.stretch.token_ids], device=self.rows.positions.device)
            self.rows.forward(ids, wanted.stretch.positions[None], keep=1)
        self.rows.n_prompt = 0  # the prompt is not read yet

    def keep(self, rows: Rows) -> None:
        """Keep the missing stretches, from rows that have read them."""
        bounds = list(itertools.pairwise((0, *self._row.reusable)))
        bounds = bounds[len(bounds) - len(self._missing) :]
        kept = [(one, cut_out(rows, *span)) for one, span in zip(self._missing, bounds, strict=True)]
        self._reuse.keep(self._part, kept)


def _read_whole(
    loaded: LoadedModel, layout: Layout, row: Spelled, score_question: bool, reuse: Reuse | None
) -> PrefilledGroup:
    """Read one row as one sequence, after as many of its leading tokens as are found.

    With ``reuse``, each reusable stretch is read in a pass of its own, found or not found: then what is computed
    from it is the same to the last bit.
    """
    keep = logits_to_keep(row.layout, score_question)
    if reuse is None or not row.reusable or not loaded.keeps_all_keys:
        empty = Rows(loaded, new_cache(loaded), row.positions[:, :0], edits=row.edits)
        return _read_rest(loaded, layout, row, empty, keep)
    led = _Led(loaded, row, reuse)
    if row.edits.attend is None:
        led.read_missing()
    group = _read_rest(loaded, layout, row, led.rows, keep, led.cached)
    led.keep(group.rows)
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
