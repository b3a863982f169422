"""Prefill: reads a prompt under a plan, row by row, or passage by passage where passages are independent.

Independent of the method, the text and sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from rag_posfix.errors import PlanConflictError
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch
from rag_posfix.generation.prefill.per_passage import (
    KVLookup,
    KVRequest,
    PrefilledGroup,
    ResolvedRow,
    Segment,
    cached_passages,
    can_share_batch,
    concatenate_kv,
    copy_kv,
    encode_passages,
    encode_segments,
    independent_row,
    join_batches,
    logits_at_once,
    logits_to_keep,
    prefill_blended,
    prefill_per_passage,
    prefill_question,
    prefilled_group,
    resolve,
)
from rag_posfix.patching.attention_hook import Observer
from rag_posfix.patching.snapshots import SnapshotError
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.plan import Plan, RowPlan


def prefill(
    loaded: LoadedModel, layout: Layout, plan: Plan, kv_lookup: KVLookup | None = None
) -> list[PrefilledGroup]:
    """Read the prompt and return groups of rows; the rows of all groups, in order, are the plan's rows.

    Cost: plans with independent passages encode prefix and passages once, in batches, and concatenate them;
    all-passages rows and other plans read each row as one sequence. What ``kv_lookup`` finds is not read again. Models
    without the attention hook read all rows in one batch where they can.
    """
    rows = [resolve(row, layout, loaded.device) for row in plan.rows]
    if plan.blend is not None and layout.n_passages and loaded.keeps_all_keys:
        return [prefill_blended(loaded, layout, rows[0], plan.blend, kv_lookup)]
    if loaded.spec.unhooked is not None:
        return _prefill_plain(loaded, layout, rows, plan.score_question, kv_lookup)
    groups = []
    if plan.independent_passages and layout.n_passages and loaded.keeps_all_keys and can_share_batch(rows):
        n_independent = sum(not row.all_passages for row in plan.rows)
        groups = [prefill_per_passage(loaded, layout, rows[:n_independent], plan.score_question, kv_lookup)]
        rows = rows[n_independent:]
    return [*groups, *(_prefill_row(loaded, layout, row, plan.score_question, kv_lookup) for row in rows)]


def cached_segments(loaded: LoadedModel, layout: Layout, plan: Plan, kv_lookup: KVLookup) -> tuple[bool, ...]:
    """Return whether the prefix, and each passage, of a prompt is stored as ``prefill`` would look it up."""
    row_plans = plan.rows if plan.calibration is None else (RowPlan(reusable=layout.boundaries),)
    rows = [resolve(row, layout, loaded.device) for row in row_plans]
    n_segments = layout.n_passages + 1
    if not loaded.stores_keys or not rows:
        return (False,) * n_segments
    if plan.blend is not None and layout.n_passages:
        return cached_passages(loaded, layout, [independent_row(layout, rows[0])], kv_lookup)
    apart = plan.calibration is None and plan.independent_passages and layout.n_passages > 0
    if apart and loaded.keeps_all_keys and can_share_batch(rows):
        independent = [row for row, row_plan in zip(rows, row_plans, strict=True) if not row_plan.all_passages]
        return cached_passages(loaded, layout, independent, kv_lookup)
    stored: set[int] = set()
    for row in rows if apart else rows[:1]:
        row = _reusable(loaded, row)
        stop = _CachedPrefix(loaded, row, kv_lookup).cached_tokens
        stored |= {-1} if len(layout.prefix) <= stop else set()
        stored |= {passage for passage, span in row.passage_spans if span.stop <= stop}
    return tuple(index in stored for index in range(-1, layout.n_passages))


def prefill_ahead(loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup) -> int:
    """Read prefix and passages of rows into the store; return how many tokens had to be read."""
    if loaded.keeps_all_keys:
        kv, cached = encode_passages(loaded, layout, rows, kv_lookup)
        return sum(segment.shape[3] for segment in kv.values()) - cached
    n_read = 0
    for row in rows:
        row = replace(row, reusable=row.layout.boundaries)
        if loaded.snapshots is not None and not (row := _reusable(loaded, row)).reusable:
            continue
        prefix = _CachedPrefix(loaded, row, kv_lookup)
        prefix.read()
        n_read += row.layout.suffix.start - prefix.cached_tokens
    return n_read


def extend(loaded: LoadedModel, layout: Layout, row: RowPlan, before: SequenceBatch, length: int) -> PrefilledGroup:
    """Read a prompt by ``row`` after a copy of the first ``length`` tokens of a batch with the same beginning."""
    resolved = resolve(row, layout, loaded.device)
    return _prefill_remaining(loaded, layout, resolved, before.truncated(length, resolved.overrides), 1)


def prefill_context(
    loaded: LoadedModel, layout: Layout, kv_lookup: KVLookup | None = None, last_layer: int | None = None
) -> SequenceBatch:
    """Read prefix and passages of a prompt as the model was trained to; any suffix may follow in the batch returned.

    For models that keep all keys in every layer. Shares stored segments with prompts that are read in full.

    ``last_layer`` is the last layer that is read (``SequenceBatch.prefill_layers``), without ``kv_lookup``: the store
    has all layers, so all are read.
    """
    row = resolve(RowPlan(reusable=layout.boundaries), layout, loaded.device)
    if kv_lookup is not None and row.reusable:
        prefix = _CachedPrefix(loaded, row, kv_lookup)
        prefix.prefill_missing()
        prefix.add_missing(prefix.batch)
        return prefix.batch
    batch = SequenceBatch.empty(loaded)
    context = layout.token_ids[: layout.suffix.start]
    if context:
        ids = torch.tensor([context], device=loaded.device)
        positions = row.positions[:, : len(context)]
        if last_layer is None:
            batch.forward(ids, positions, keep=1, ends_prompt=False)
        else:
            batch.prefill_layers(ids, positions, last_layer)
    return batch


class _CachedPrefix:
    """The first tokens of a row: ``batch`` has the stored segments, then the segments of ``prefill_missing``.

    A row that the model reads as it was trained to begins with two segments that methods with independent passages
    read too, and share with it: the prefix, and the first passage after it.
    """

    def __init__(self, loaded: LoadedModel, row: ResolvedRow, kv_lookup: KVLookup) -> None:
        ends = _independent_ends(loaded, row)
        if ends:
            row = replace(row, reusable=(*ends, *(end for end in row.reusable if end > ends[-1])))
        self._loaded, self._kv_lookup, self._row = loaded, kv_lookup, row
        form, requests = loaded.snapshots, _prefix_requests(row)
        self._encoding = (
            kv_lookup.prefix_encoding(row.overrides) if form is None else kv_lookup.snapshot_encoding(form)
        )
        self._independent = requests[: len(ends)]
        entries = kv_lookup.find(loaded, kv_lookup.independent_encoding(row.overrides), self._independent)
        entries = [*entries, *kv_lookup.find(loaded, self._encoding, requests[len(ends) :]), None]
        self._cached_segments = [kv for kv in entries[: entries.index(None)] if kv is not None]
        self._missing = requests[max(len(ends), len(self._cached_segments)) :]
        self.cached_tokens = row.reusable[len(self._cached_segments) - 1] if self._cached_segments else 0

    @cached_property
    def batch(self) -> SequenceBatch:
        """A batch of the row alone."""
        self._encode_independent()
        if not self._cached_segments:
            return SequenceBatch.empty(self._loaded, overrides=self._row.overrides)
        length = self._row.reusable[len(self._cached_segments) - 1]
        more_tokens, positions = len(self._row.layout.token_ids) - length, self._row.positions[:, :length]
        return concatenate_kv(self._loaded, [self._cached_segments], [positions], more_tokens, self._row.overrides)

    def _encode_independent(self) -> None:
        """Read prefix and first passage, where they are missing, as ``encode_passages`` does, and add them."""
        for request in self._independent[len(self._cached_segments) :]:
            before = (request.before[0], self._cached_segments[0]) if request.before else None
            encoded = encode_segments(self._loaded, [request.segment], before, self._row.overrides)
            encoding = self._kv_lookup.independent_encoding(self._row.overrides)
            self._kv_lookup.add(encoding, [(request, encoded[0])])
            self._cached_segments += encoded

    def prefill_missing(self) -> None:
        """Read each missing segment in its own forward pass: results do not depend on what the store holds."""
        for request in self._missing:
            ids = torch.tensor([request.segment.token_ids], device=self._loaded.device)
            self.batch.prefill(ids, request.segment.positions[None])

    def add_missing(self, batch: SequenceBatch) -> None:
        """Add the missing segments to the store, from a batch that has read them."""
        self._kv_lookup.add(self._encoding, list(zip(self._missing, self._copies(batch), strict=True)))

    def read_batch(self) -> SequenceBatch:
        """Return ``batch`` with all segments; what the store lacks is read and added."""
        self.read()
        return self.batch

    def read(self) -> list[Tensor]:
        """Return the keys and values of all segments; what the store lacks is read and added."""
        try:
            _ = self.batch
        except SnapshotError:  # it is of another version of the library
            self._missing = _prefix_requests(self._row)
            self._cached_segments, self.cached_tokens = [], 0
        self.prefill_missing()
        copies = self._copies(self.batch) if self._missing else []
        self._kv_lookup.add(self._encoding, list(zip(self._missing, copies, strict=True)))
        return [*self._cached_segments, *copies]

    def _copies(self, batch: SequenceBatch) -> list[Tensor]:
        bounds = list(itertools.pairwise((0, *self._row.reusable)))
        return [copy_kv(batch, *span) for span in bounds[len(bounds) - len(self._missing) :]]


def _independent_ends(loaded: LoadedModel, row: ResolvedRow) -> tuple[int, ...]:
    """Return where the prefix and the first passage of a row end, if no method changes how they are read."""
    layout, overrides = row.layout, row.overrides
    changes = overrides.mask or overrides.attend or overrides.rotates_in_hook
    if changes or not layout.passages or not loaded.keeps_all_keys or loaded.spec.unhooked is not None:
        return ()
    ends = (layout.prefix.stop, layout.passages[0].stop)
    return tuple(stop for start, stop in itertools.pairwise((0, *ends)) if stop > start)


def _prefill_row(
    loaded: LoadedModel, layout: Layout, row: ResolvedRow, score_question: bool, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Read one row as one sequence, after as many of its first tokens as the store holds.

    With ``kv_lookup``, each reusable segment is read in its own forward pass. Results are then bit-identical with a
    cold or warm store.
    """
    keep = logits_to_keep(row.layout, score_question)
    row = _reusable(loaded, row)
    if kv_lookup is None or not row.reusable or not loaded.stores_keys:
        empty = SequenceBatch.empty(loaded, overrides=row.overrides)
        return _prefill_remaining(loaded, layout, row, empty, keep)
    prefix = _CachedPrefix(loaded, row, kv_lookup)
    if loaded.snapshots is not None:
        prefix.read()  # and saved before the question follows
        return _prefill_remaining(loaded, layout, row, prefix.batch, keep, prefix.cached_tokens)
    attend = row.overrides.attend
    if attend is None or attend.standard_from in row.reusable[:1]:  # else its attention needs the whole prompt at once
        prefix.prefill_missing()
    group = _prefill_remaining(loaded, layout, row, prefix.batch, keep, prefix.cached_tokens)
    prefix.add_missing(group.batch)
    return group


def _reusable(loaded: LoadedModel, row: ResolvedRow) -> ResolvedRow:
    """Return the row with all ends of segments that are stored: of passages, and of earlier turns behind them.

    A snapshot is of all tokens of a row with one passage, up to its question.
    """
    if loaded.snapshots is not None:
        least = MIN_SNAPSHOT_TOKENS.get(loaded.device.type, _MIN_ON_DEVICES)
        is_stored = len(row.passages) <= 1 and row.layout.suffix.start >= least
        return replace(row, reusable=(row.layout.suffix.start,) if is_stored else ())
    ends = row.reusable or (row.layout.boundaries if loaded.kept is not None else ())
    return replace(row, reusable=(*ends, *row.layout.turn_starts) if row.layout.suffix.start in ends[-1:] else ends)


MIN_SNAPSHOT_TOKENS = {"cpu": 32}
_MIN_ON_DEVICES = 128
"""Least tokens of prefix and passage of which a snapshot is kept: fewer are read about as fast as it is filled in."""

ROW_TOKENS = 2**15
"""Rows are read in one batch up to this many tokens, padding included: the memory of its activations is bounded."""


def _prefill_plain(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], score_question: bool, kv_lookup: KVLookup | None
) -> list[PrefilledGroup]:
    """Read the rows of a model without the attention hook in one batch, padded in front.

    With ``kv_lookup``, the stored part of each row is found or read by itself, so that its bits do not depend on what
    the store holds; the rest of all rows is read together. Rows that cannot share a batch are read one after another.
    """
    forward, stores = loaded.spec.unhooked, kv_lookup is not None and loaded.stores_keys
    rows = [_reusable(loaded, row) for row in rows]
    if kv_lookup is not None and loaded.snapshots is not None and any(row.reusable for row in rows) and len(rows) > 1:
        return _prefill_snapshots(loaded, layout, rows, score_question, kv_lookup)
    starts = [row.reusable[-1] if stores and row.reusable else 0 for row in rows]
    rest = [row.layout.token_ids[start:] for row, start in zip(rows, starts, strict=True)]
    keep = {logits_to_keep(row.layout, score_question) for row in rows}
    n_tokens, n_rest = max(len(row.layout.token_ids) for row in rows), {len(tokens) for tokens in rest}
    alone = len(rows) == 1 or forward is None or not forward.batch or len(rows) * n_tokens > ROW_TOKENS
    alone = alone or max(keep) > logits_at_once(loaded, len(rows))
    if alone or len(keep) > 1 or (any(starts) and len(n_rest) > 1):
        return [_prefill_row(loaded, layout, row, score_question, kv_lookup) for row in rows]
    cached = 0
    if kv_lookup is not None and any(starts):
        before = [_CachedPrefix(loaded, row, kv_lookup) for row in rows]
        held = [prefix.read() for prefix in before]
        cached = sum(max(0, prefix.cached_tokens - len(layout.prefix)) for prefix in before)
        cached += len(layout.prefix) if any(prefix.cached_tokens for prefix in before) else 0
        positions = [row.positions[:, :start] for row, start in zip(rows, starts, strict=True)]
        batch = concatenate_kv(loaded, held, positions, max(n_rest), rows[0].overrides)
    else:
        padding = tuple(max(n_rest) - len(tokens) for tokens in rest)
        batch = SequenceBatch.empty(loaded, len(rows), starts=padding)
    ids = torch.zeros((len(rows), max(n_rest)), dtype=torch.long)
    positions_of = torch.zeros(ids.shape)
    for index, (row, tokens) in enumerate(zip(rows, rest, strict=True)):
        ids[index, -len(tokens) :] = torch.tensor(tokens)
        positions_of[index, -len(tokens) :] = row.positions[0, -len(tokens) :]
    observer = Observer()
    read = prefill_question(batch, ids.to(loaded.device), positions_of, rows[0].layout, keep.pop(), observer)
    return [prefilled_group(batch, read, layout, rows, observer, cached)]


def _prefill_snapshots(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], score_question: bool, kv_lookup: KVLookup
) -> list[PrefilledGroup]:
    """Read each row up to its question, or fill it from its snapshot; then the question, in one batch where possible.

    Rows that are read apart are joined for the answer, so that each of its tokens takes one pass for all rows.
    """
    forward, form = loaded.spec.unhooked, loaded.snapshots
    prefixes = [_CachedPrefix(loaded, row, kv_lookup) if row.reusable else None for row in rows]
    batches = [
        _read_context(loaded, row) if prefix is None else prefix.read_batch()
        for row, prefix in zip(rows, prefixes, strict=True)
    ]
    found = [prefix.cached_tokens for prefix in prefixes if prefix is not None and prefix.cached_tokens]
    cached = sum(tokens - len(layout.prefix) for tokens in found) + (len(layout.prefix) if found else 0)
    keeps = [logits_to_keep(row.layout, score_question) for row in rows]
    n_tokens = max(len(row.layout.token_ids) for row in rows)
    joins = "" if forward is None or len(rows) * n_tokens > ROW_TOKENS else forward.joins
    observer = Observer()
    rest = [row.layout.token_ids[batch.length :] for row, batch in zip(rows, batches, strict=True)]
    alike = len(set(map(len, rest))) == len(set(keeps)) == 1 and keeps[0] <= logits_at_once(loaded, len(rows))
    if form is not None and joins == "question" and alike:
        with suppress(SnapshotError):
            batch, positions = join_batches(form, batches), [row.positions[:, -len(rest[0]) :] for row in rows]
            ids = torch.tensor(rest, device=loaded.device)
            read = prefill_question(batch, ids, torch.cat(positions), rows[0].layout, keeps[0], observer)
            return [prefilled_group(batch, read, layout, rows, observer, cached)]
    groups = [
        _prefill_remaining(loaded, layout, row, batch, keep, cached)
        for row, batch, keep in zip(rows, batches, keeps, strict=True)
    ]
    if form is not None and joins:
        with suppress(SnapshotError):
            batch = join_batches(form, [group.batch for group in groups])
            read = torch.cat([group.logits for group in groups]), torch.cat([group.question for group in groups])
            return [prefilled_group(batch, read, layout, rows, observer, cached)]
    return groups


def _read_context(loaded: LoadedModel, row: ResolvedRow) -> SequenceBatch:
    """Return a batch that has read a row up to its question, if that is short, so that it is read with others."""
    batch, stop = SequenceBatch.empty(loaded), row.layout.suffix.start
    if stop and len(row.passages) <= 1:
        ids = torch.tensor([row.layout.token_ids[:stop]], device=loaded.device)
        batch.forward(ids, row.positions[:, :stop], keep=1, ends_prompt=False)
    return batch


def _prefix_requests(row: ResolvedRow) -> list[KVRequest]:
    """Return the row's reusable segments, each after those before it and tagged by all passages that went into it."""
    bounds = list(itertools.pairwise((0, *row.reusable)))
    segments = [Segment(row.layout.token_ids[a:b], row.positions[0, a:b]) for a, b in bounds]
    tags = [
        tuple(key for key, span in zip(row.layout.keys, row.layout.passages, strict=True) if span.start < b)
        for _, b in bounds
    ]
    is_history = [a >= row.layout.suffix.start for a, _ in bounds]
    return [KVRequest(segment, tuple(segments[:i]), tags[i], is_history[i]) for i, segment in enumerate(segments)]


def _prefill_remaining(
    loaded: LoadedModel, layout: Layout, row: ResolvedRow, before: SequenceBatch, keep: int, cached_tokens: int = 0
) -> PrefilledGroup:
    """Read the tokens of a row that ``before`` does not hold yet."""
    start = before.length
    observer = Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    apart = bool(row.reusable) and row.overrides.attend is None and loaded.stores_keys  # as its segments are
    read = prefill_question(before, ids, row.positions[:, start:], row.layout, keep, observer, in_parts=apart)
    return prefilled_group(before, read, layout, [row], observer, cached_tokens)


def prefill_calibrated(
    loaded: LoadedModel, layout: Layout, plan: Plan, kv_lookup: KVLookup | None = None
) -> tuple[Plan, list[PrefilledGroup]]:
    """Run the plan's calibration pass, if it has one, then prefill; return the plan that was run and its groups.

    Raises:
        PlanConflictError: a calibration pass whose prompt is continued has decided on several rows.
    """
    calibration = plan.calibration
    if calibration is None:
        return plan, prefill(loaded, layout, plan, kv_lookup)
    measured, first = passage_attention(loaded, calibration.layouts, calibration.continue_from or 0, kv_lookup)
    decided = calibration.decide(measured)
    if calibration.continue_from is None or not loaded.keeps_all_keys:
        return prefill_calibrated(loaded, layout, decided, kv_lookup)
    if len(decided.rows) != 1 or decided.calibration is not None:
        raise PlanConflictError(
            f"a calibration pass decided on {len(decided.rows)} rows; where its prompt is continued it must decide on "
            "one row, without a further calibration pass"
        )
    group = extend(loaded, layout, decided.rows[0], first.batch, first.batch.length - 1)
    return decided, [replace(group, cached_tokens=first.cached_tokens)]


def passage_attention(
    loaded: LoadedModel,
    layouts: Sequence[Layout],
    base: int = 0,
    kv_lookup: KVLookup | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[Tensor, PrefilledGroup]:
    """Read prompts unmodified; return the last token's mean attention per token of each passage, and one prefill.

    Cost: the prompt ``base`` is read in full; of every other prompt, only the tokens after their common beginning.
    ``check`` is called before each other prompt; its exception ends the pass.

    Shapes:
        returns: (len(layouts), N) float32 on the CPU, averaged over layers and heads; the prefill of ``base``.
    """
    plan = Plan(rows=(RowPlan(reusable=layouts[base].boundaries),))
    full = prefill(loaded, layouts[base], plan, kv_lookup)[0]
    rows = []
    for index, layout in enumerate(layouts):
        if check is not None and index != base:
            check()
        if index == base:
            group = full
        elif loaded.keeps_all_keys:
            group = extend(loaded, layout, RowPlan(), full.batch, _shared_tokens(layout, layouts[base]))
        else:
            group = prefill(loaded, layout, Plan())[0]
        rows.append(group.passage_attention[0].float())
    lengths = torch.tensor([[max(len(span), 1) for span in layout.passages] for layout in layouts])
    return torch.stack(rows).cpu() / lengths, full  # read once


def _shared_tokens(layout: Layout, other: Layout) -> int:
    """Return how many first tokens two prompts share, the last token of the shorter left out."""
    pairs = zip(layout.token_ids[:-1], other.token_ids[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
