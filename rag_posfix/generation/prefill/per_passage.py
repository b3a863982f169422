"""Prefill of prompts whose passages are encoded independently, as they are or with tokens recomputed (CacheBlend).

Token segments: encoded independently, concatenated in a batch, found in the passage KV store and added to it.

Rows of a plan: resolved for one prompt before prefill, and read in one batch after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_posfix.attention.masks import window_positions, windows_of
from rag_posfix.attention.rope import SelectedAttention, deviation, first_tokens, largest
from rag_posfix.caching.kv.store import (
    CacheSnapshot,
    EncodingKey,
    EntryShape,
    ExpectedShape,
    PassageKV,
    SnapshotShape,
    passage_key,
)
from rag_posfix.contracts.request import tenant_tags
from rag_posfix.errors import GenerationError
from rag_posfix.generation.model.batch_invariance import blocks_of
from rag_posfix.generation.model.sequence_batch import (
    SPARE_TOKENS,
    GrowingCache,
    LoadedModel,
    SequenceBatch,
    run_model,
)
from rag_posfix.patching.attention_hook import ForwardContext, Observer, Overrides, rerotate
from rag_posfix.patching.snapshots import SnapshotForm
from rag_posfix.patching.spec import KeptKeys, PlainCache
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import Blend, RowPlan

if TYPE_CHECKING:
    from rag_posfix.caching.kv.store import PassageStore


BATCH_TOKENS = 8192
"""Segments are encoded together up to this many padded tokens: enough to fill the processor, little memory."""

COPIED_NUMBERS = 2**24
"""Keys or values of all rows that are copied at a time: few operations for short passages, little memory for long."""

PASS_TOKENS = 128
"""A forward pass reads all weights: it costs about as much as this many more tokens in a pass that is made anyway."""

TILE = 16
"""Query rows that attention kernels compute at once. Rows of an incomplete tile are computed in another way, in
bfloat16 with other last bits. Padded to whole tiles, the encoding of a segment does not depend on the longest of its
batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens to be read, and their positions, (T,) float32 on the CPU."""

    token_ids: tuple[int, ...]
    positions: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


def encode_segments(
    loaded: LoadedModel, segments: Sequence[Segment], prefix: tuple[Segment, Tensor] | None, overrides: Overrides
) -> list[Tensor]:
    """Return the keys and values of each segment, encoded independently after ``prefix``.

    Segments of similar length share a batch, where products are computed in blocks only those of an equal number of
    tiles. Padding is at the end, where the causal mask hides it.

    Shapes:
        prefix: its tokens, and their keys and values.
        returns: (2, L, Hkv, T, D) each: keys and values of all layers. No segment may be empty.
    """
    in_blocks = loaded.pass_rows.block is not None
    widths = [-(-max(len(segment), loaded.pass_rows.least) // TILE) * TILE for segment in segments]
    result: dict[int, Tensor] = {}
    for some in group_by_width(widths, equal_only=in_blocks):
        longest = widths[some[0]]
        if prefix is None:
            batch = SequenceBatch.empty(loaded, len(some), overrides)
        else:  # every row holds the prefix
            rows, positions = [[prefix[1]]] * len(some), [prefix[0].positions[None]] * len(some)
            batch = concatenate_kv(loaded, rows, positions, longest, overrides)
        before = batch.length
        tokens = torch.zeros((len(some), longest), dtype=torch.long)
        positions_of = torch.zeros((len(some), longest))
        for row, i in enumerate(some):
            tokens[row, : len(segments[i])] = torch.tensor(segments[i].token_ids)
            positions_of[row, : len(segments[i])] = segments[i].positions
            positions_of[row, len(segments[i]) :] = segments[i].positions[-1]
        with blocks_of(longest if in_blocks else None):  # its shape depends on its length alone
            batch.prefill(tokens.to(loaded.device), positions_of)
        result.update(zip(some, copy_rows(batch, before, [len(segments[i]) for i in some]), strict=True))
    return [result[i] for i in range(len(segments))]


def group_by_width(widths: Sequence[int], *, equal_only: bool = False) -> list[list[int]]:
    """Return which segments are encoded in one pass, the widest of each pass first.

    Formula: of all groups of neighbours by width, those with the least sum of (rows times the greatest width +
        ``PASS_TOKENS``), each of at most ``BATCH_TOKENS`` or of one row. With ``equal_only`` a group has one width.
    """
    order = sorted(range(len(widths)), key=lambda i: -widths[i])
    costs, starts = [0], [0]
    for stop in range(1, len(order) + 1):
        options = []
        for start in reversed(range(stop)):
            width, n_rows = widths[order[start]], stop - start
            unequal = equal_only and width != widths[order[stop - 1]]
            if n_rows > 1 and (unequal or n_rows * width > BATCH_TOKENS):
                break
            options.append((costs[start] + n_rows * width + PASS_TOKENS, start))
        cost, start = min(options)
        costs.append(cost)
        starts.append(start)
    groups, stop = [], len(order)
    while stop:
        groups.append(order[starts[stop] : stop])
        stop = starts[stop]
    return groups


def copy_kv(batch: SequenceBatch, start: int, stop: int, row: int = 0) -> Tensor:
    """Return a copy of the keys and values of some tokens of a row, (2, L, Hkv, stop - start, D), or a snapshot."""
    if (kept := batch.loaded.kept) is not None:
        return kept.flatten(batch.cache.held, start, stop, row)
    if (form := batch.loaded.snapshots) is not None:  # of all tokens read so far, which end at ``stop``
        return form.save(batch.cache.held)
    layers = batch.cache.layers
    keys = torch.stack([layer.keys[row, :, start:stop] for layer in layers])
    values = torch.stack([layer.values[row, :, start:stop] for layer in layers])
    return torch.stack((keys, values))


def copy_rows(batch: SequenceBatch, start: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return a copy of the keys and values of each row's tokens from ``start`` on, (2, L, Hkv, length, D) each."""
    layers, first = batch.cache.layers, batch.cache.layers[0].keys
    copies = [first.new_empty((2, len(layers), first.shape[1], length, first.shape[3])) for length in lengths]
    step = max(1, COPIED_NUMBERS // first.numel())
    for layer in range(0, len(layers), step):
        some = layers[layer : layer + step]
        for half, kv in enumerate(([each.keys for each in some], [each.values for each in some])):
            stacked = torch.stack(kv)  # (l, R, Hkv, T, D)
            for row, (copy, length) in enumerate(zip(copies, lengths, strict=True)):
                copy[half, layer : layer + len(some)] = stacked[:, row, :, start : start + length]
    return copies


def concatenate_kv(
    loaded: LoadedModel,
    rows: Sequence[Sequence[Tensor]],
    positions: Sequence[Tensor],
    more_tokens: int,
    overrides: Overrides,
) -> SequenceBatch:
    """Return a batch whose rows hold segments end to end; shorter rows are padded in front.

    ``more_tokens`` will follow at least: the cache gets capacity for them.

    Shapes:
        rows: The keys and values of each row's segments, (2, L, Hkv, T, D) each.
        positions: (1, T) of each row, all its segments together, on the CPU.
    """
    lengths = [p.shape[1] for p in positions]
    longest = max(lengths)
    some = next((segment for row in rows for segment in row), None)
    if some is None:  # nothing was read yet in any row
        return SequenceBatch.empty(loaded, len(rows), overrides)
    cache: GrowingCache | PlainCache
    if loaded.snapshots is not None:
        cache = PlainCache(
            tuple(longest - n for n in lengths), loaded.snapshots.fill([row[0] for row in rows]), longest
        )
    elif loaded.kept is not None:
        cache = _plain_cache(loaded.kept, rows, lengths)
    else:
        cache = _growing_cache(rows, lengths, longest + more_tokens + SPARE_TOKENS)
    filled = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in positions])
    starts = tuple(longest - length for length in lengths)
    return SequenceBatch(
        loaded,
        cache,
        filled.to(loaded.device),
        starts=starts if any(starts) else (),
        overrides=overrides,
        length=longest,
    )


def _growing_cache(rows: Sequence[Sequence[Tensor]], lengths: Sequence[int], capacity: int) -> GrowingCache:
    some, longest = next(segment for row in rows for segment in row), max(lengths)
    both, n_layers, n_heads, _, channels = some.shape
    buffers = some.new_empty((both, n_layers, len(rows), n_heads, capacity, channels))
    for row, segments in enumerate(rows):
        start = longest - lengths[row]
        buffers[:, :, row, :, :start] = 0  # nothing reads it, but a NaN there would spread through 0 * NaN
        for segment in segments:
            buffers[:, :, row, :, start : start + segment.shape[3]] = segment
            start += segment.shape[3]
    return GrowingCache.over(buffers, longest)


def _plain_cache(kept: KeptKeys, rows: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> PlainCache:
    longest, some = max(lengths), next(segment for row in rows for segment in row)
    flat = []
    for segments, length in zip(rows, lengths, strict=True):
        padding = some.new_zeros((2, 1, 1, longest - length, kept.width))
        flat.append(torch.cat([padding, *segments], dim=3))
    return PlainCache(tuple(longest - length for length in lengths), kept.cache(flat), longest)


def join_batches(form: SnapshotForm, batches: Sequence[SequenceBatch]) -> SequenceBatch:
    """Return a batch with the rows of batches without the attention hook; shorter rows are padded in front.

    Raises:
        SnapshotError: the caches do not fit into one.
    """
    longest = max(batch.length for batch in batches)
    starts = tuple(longest - batch.length for batch in batches)
    padded = [torch.nn.functional.pad(b.positions, (longest - b.length, 0)) for b in batches]
    return replace(
        batches[0],
        cache=PlainCache(starts, form.join([batch.cache.held for batch in batches]), longest),
        positions=torch.cat(padded),
        starts=starts if any(starts) else (),
        prompt_length=longest if batches[0].prompt_length else 0,
        length=longest,
    )


@dataclass(frozen=True, slots=True, eq=False)
class KVRequest:
    """A segment of tokens whose keys and values are needed.

    Attributes:
        before: The segments before it. Its keys and values depend on them and the model only.
        tags: The content keys of its passages; the entry can be deleted by them.
        is_history: Whether it is of a conversation's earlier turns, which are kept in memory alone.
    """

    segment: Segment
    before: tuple[Segment, ...] = ()
    tags: tuple[str, ...] = ()
    is_history: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KVLookup:
    """The passage KV store as one prompt under one method sees it.

    Attributes:
        model: Identity of weights and dtype.
        method: Identity of the method and its parameters.
        salt: Entries of another salt are not seen: one per tenant.
        computation: What is deleted while it is open is not stored.
    """

    store: PassageStore
    model: str
    method: str
    salt: str = ""
    computation: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "computation", self.store.begin())

    def independent_encoding(self, overrides: Overrides) -> EncodingKey:
        """Return what changes segments that are encoded independently, besides their tokens; part of their keys.

        Methods that differ in nothing else share entries.
        """
        return "apart", overrides.rope_base_factor, overrides.layer_scale

    def prefix_encoding(self, overrides: Overrides) -> EncodingKey:
        """Return what changes the first tokens of a prompt. Methods share segments that are read causally."""
        causal = overrides.attend is None and overrides.mask is None and not overrides.rotates_in_hook
        return "runs", overrides.rope_base_factor, overrides.layer_scale, "" if causal else self.method

    def snapshot_encoding(self, form: SnapshotForm) -> EncodingKey:
        """Return what changes a snapshot of a model without the attention hook, besides the tokens."""
        return "snapshot", form.name

    def history_encoding(self, overrides: Overrides, n_rows: int, n_tokens: int) -> EncodingKey:
        """Return what changes earlier turns that are read in rows of at most ``n_tokens``, besides their tokens.

        The padding of a row, and the number of rows, change its last bits.
        """
        return "history", overrides.rope_base_factor, overrides.layer_scale, n_rows, n_tokens

    def find(self, loaded: LoadedModel, encoding: EncodingKey, requests: Sequence[KVRequest]) -> list[Tensor | None]:
        """Return the keys and values (2, L, Hkv, T, D) of each segment, on the model's device; None if not stored.

        Of models with ``snapshots``, their bytes.
        """
        is_snapshot = loaded.snapshots is not None
        sizes, dtype = loaded.entry_sizes, torch.uint8 if is_snapshot else loaded.model.dtype
        keys = [self._key(dtype, encoding, request) for request in requests]
        entries: dict[str, PassageKV] = {}
        for is_history in (False, True):
            shapes: dict[str, ExpectedShape] = {
                key: SnapshotShape() if is_snapshot else EntryShape(*sizes, dtype, len(request.segment))
                for key, request in zip(keys, requests, strict=True)
                if request.is_history == is_history
            }
            if shapes:
                entries |= self.store.get_many(shapes, memory_only=is_history)
        return [entries[key].kv.to(loaded.device) if key in entries else None for key in keys]

    def add(self, encoding: EncodingKey, encoded: Sequence[tuple[KVRequest, Tensor]]) -> None:
        """Add the keys and values of segments to the store."""
        for is_history in (False, True):
            entries: dict[str, PassageKV] = {}
            tags: dict[str, Sequence[str]] = {}
            for request, kv in encoded:
                if request.is_history == is_history:
                    key = self._key(kv.dtype, encoding, request)
                    entries[key] = PassageKV(kv) if kv.ndim > 1 else CacheSnapshot(kv)
                    tags[key] = (*request.tags, *tenant_tags(self.salt, request.tags))
            if entries:
                self.store.put_many(entries, tags, memory_only=is_history)

    def _key(self, dtype: torch.dtype, encoding: EncodingKey, request: KVRequest) -> str:
        before = tuple(token for segment in request.before for token in segment.token_ids)
        positions = torch.cat([segment.positions for segment in (*request.before, request.segment)])
        cuts = (len(segment) for segment in request.before[1:])  # tokens that are cut otherwise have other last bits
        where = (encoding, *cuts, _consecutive_runs(positions))
        return passage_key(self.model, dtype, where, before, request.segment.token_ids, self.salt)


def _consecutive_runs(positions: Tensor) -> tuple[tuple[float, int], ...]:
    """Return positions as runs of consecutive ones: first and length of each."""
    values: list[float] = positions.tolist()
    runs, first = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            runs.append((values[first], i - first))
            first = i
    return tuple(runs)


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


MAX_SCORE_ELEMENTS = 1 << 28
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
    return max(1, MAX_SCORE_ELEMENTS // (n_rows * int(loaded.model.config.get_text_config().vocab_size)))


def prefill_question(
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
    """Return the result of a prefill whose last passes were ``prefill_question`` and had the ``observer``."""
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


def can_share_batch(rows: Sequence[ResolvedRow]) -> bool:
    """Return whether passages may be encoded independently of the question, and the rows read in one batch."""
    first = rows[0].overrides
    return all(
        row.overrides.head_scale is None
        and row.overrides.hidden_scale is None
        and row.overrides.rope_base_factor == first.rope_base_factor
        and row.overrides.layer_scale == first.layer_scale
        and (row.overrides.attend is None or len(rows) == 1)
        for row in rows
    )


def prefill_per_passage(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], score_question: bool, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Read prefix and passages once, concatenate them per row, and read the suffix in all rows together.

    With ``kv_lookup``, earlier turns in the suffix are read in passes of their own, to be found again in later turns.
    """
    kv, cached = encode_passages(loaded, layout, rows, kv_lookup)
    context = [[kv[key] for key in _keys_of(row)] for row in rows]
    overrides = replace(_encoding_overrides(rows), attend=rows[0].overrides.attend)
    turns: list[_EarlierTurn] = []
    found: list[list[Tensor]] = []
    if kv_lookup is not None and layout.turn_starts and overrides.attend is None:
        encoding = kv_lookup.history_encoding(overrides, len(rows), max(row.layout.suffix.start for row in rows))
        turns = _earlier_turns(layout, rows)
        found = _find_turns(loaded, turns, encoding, kv_lookup)
    start = layout.suffix.start
    read = turns[len(found) - 1].span.stop if found else start
    batch = concatenate_kv(
        loaded,
        [[*segments, *(turn[index] for turn in found)] for index, segments in enumerate(context)],
        [row.positions[:, : row.layout.suffix.start + read - start] for row in rows],
        len(layout.token_ids) - read,
        overrides,
    )
    for turn in turns[len(found) :]:
        before = batch.length
        ids = torch.tensor([layout.tokens(turn.span)] * len(rows), device=loaded.device)
        batch.forward(ids, _positions_of(layout, rows, turn.span), 1, ends_prompt=False)
        if kv_lookup is not None:
            copies = copy_rows(batch, before, [len(turn.span)] * len(rows))
            kv_lookup.add(encoding, list(zip(turn.requests, copies, strict=True)))
    asked = Span(turns[-1].span.stop if turns else start, len(layout.token_ids))
    ids = torch.tensor([layout.tokens(asked)] * len(rows), device=loaded.device)
    observer = Observer()
    keep, positions = logits_to_keep(layout, score_question), _positions_of(layout, rows, asked)
    scores = prefill_question(batch, ids, positions, layout, keep, observer, in_parts=overrides.attend is None)
    return prefilled_group(batch, scores, layout, rows, observer, cached + read - start)


@dataclass(frozen=True, slots=True, eq=False)
class _EarlierTurn:
    """An earlier turn of the conversation, answer included: its tokens in the prompt, and what each row needs."""

    span: Span
    requests: tuple[KVRequest, ...]


def _earlier_turns(layout: Layout, rows: Sequence[ResolvedRow]) -> list[_EarlierTurn]:
    """Return the earlier turns in the suffix; the question is behind them."""
    turns = []
    for start, stop in itertools.pairwise((layout.suffix.start, *layout.turn_starts)):
        requests = []
        for row in rows:
            shift = row.layout.suffix.start - layout.suffix.start
            tokens, positions = row.layout.token_ids, row.positions[0]
            before = Segment(tokens[: start + shift], positions[: start + shift])
            segment = Segment(tokens[start + shift : stop + shift], positions[start + shift : stop + shift])
            requests.append(KVRequest(segment, (before,), row.layout.keys, is_history=True))
        turns.append(_EarlierTurn(Span(start, stop), tuple(requests)))
    return turns


def _find_turns(
    loaded: LoadedModel, turns: Sequence[_EarlierTurn], encoding: EncodingKey, kv_lookup: KVLookup
) -> list[list[Tensor]]:
    """Return the keys and values in each row of the first turns that are stored for all rows."""
    entries = iter(kv_lookup.find(loaded, encoding, [request for turn in turns for request in turn.requests]))
    found: list[list[Tensor]] = []
    for turn in turns:
        held = [kv for _, kv in zip(turn.requests, entries, strict=False) if kv is not None]
        if len(held) < len(turn.requests):
            break
        found.append(held)
    return found


def _positions_of(layout: Layout, rows: Sequence[ResolvedRow], span: Span) -> Tensor:
    """Return the positions in each row of a span of the suffix, (R, T)."""
    shifts = [row.layout.suffix.start - layout.suffix.start for row in rows]
    return torch.cat([row.positions[:, span.shifted(by).slice] for row, by in zip(rows, shifts, strict=True)])


_Key = tuple[int, float]
"""A passage and its first position; the prefix is passage -1."""

_PREFIX: _Key = (-1, 0.0)


def encode_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup | None
) -> tuple[dict[_Key, Tensor], int]:
    """Return keys and values of the prefix and of every passage of a row, and the number of cached tokens.

    Cost: one forward pass over the prefix and one, or few, over all missing passages. New ones are added to the store.
    """
    overrides = _encoding_overrides(rows)
    prefix, needed = _segments_of(layout, rows)
    if not len(prefix):
        return _find_or_encode(loaded, layout, needed, None, overrides, kv_lookup)
    kv, cached = _find_or_encode(loaded, layout, {_PREFIX: prefix}, None, overrides, kv_lookup)
    passage_kv, n_cached = _find_or_encode(loaded, layout, needed, (prefix, kv[_PREFIX]), overrides, kv_lookup)
    return {**kv, **passage_kv}, cached + n_cached


def _segments_of(layout: Layout, rows: Sequence[ResolvedRow]) -> tuple[Segment, dict[_Key, Segment]]:
    """Return the prefix, and every passage of a row at each of its positions."""
    needed: dict[_Key, Segment] = {}
    for row in rows:
        for passage, span in row.passage_spans:
            positions = row.positions[0, span.slice]
            if len(span):
                tokens = layout.tokens(layout.passages[passage])
                needed.setdefault((passage, float(positions[0])), Segment(tokens, positions))
    return Segment(layout.tokens(layout.prefix), rows[0].positions[0, layout.prefix.slice]), needed


def cached_passages(
    loaded: LoadedModel, layout: Layout, rows: Sequence[ResolvedRow], kv_lookup: KVLookup
) -> tuple[bool, ...]:
    """Return whether the prefix, and each passage at all its positions, is stored."""
    encoding = kv_lookup.independent_encoding(_encoding_overrides(rows))
    prefix, needed = _segments_of(layout, rows)
    before = (prefix,) if len(prefix) else ()
    requests = [*(KVRequest(prefix) for _ in before), *(KVRequest(segment, before) for segment in needed.values())]
    entries = kv_lookup.find(loaded, encoding, requests)
    keys = [*([_PREFIX] if before else ()), *needed]
    missing = {key[0] for key, entry in zip(keys, entries, strict=True) if entry is None}
    return tuple(index not in missing for index in range(-1, layout.n_passages))


def _find_or_encode(
    loaded: LoadedModel,
    layout: Layout,
    needed: dict[_Key, Segment],
    prefix: tuple[Segment, Tensor] | None,
    overrides: Overrides,
    kv_lookup: KVLookup | None,
) -> tuple[dict[_Key, Tensor], int]:
    before = () if prefix is None else (prefix[0],)
    requests = {
        key: KVRequest(segment, before, tags=() if key == _PREFIX else (layout.keys[key[0]],))
        for key, segment in needed.items()
    }
    entries: list[Tensor | None] = [None] * len(requests)
    if kv_lookup is not None and requests:
        entries = kv_lookup.find(loaded, kv_lookup.independent_encoding(overrides), list(requests.values()))
    kv = {key: entry for key, entry in zip(requests, entries, strict=True) if entry is not None}
    cached = sum(len(needed[key]) for key in kv)
    missing = [key for key in requests if key not in kv]
    encoded = encode_segments(loaded, [needed[key] for key in missing], prefix, overrides)
    kv.update(zip(missing, encoded, strict=True))
    if kv_lookup is not None:
        kv_lookup.add(kv_lookup.independent_encoding(overrides), [(requests[key], kv[key]) for key in missing])
    return kv, cached


def _encoding_overrides(rows: Sequence[ResolvedRow]) -> Overrides:
    """Return what passages are encoded with: mask and attention do not reach into an independently encoded passage."""
    return replace(rows[0].overrides, mask=None, attend=None)


def _keys_of(row: ResolvedRow) -> list[_Key]:
    keys = [(passage, float(row.positions[0, span.start])) for passage, span in row.passage_spans if len(span)]
    return [_PREFIX, *keys] if len(row.layout.prefix) else keys


def prefill_blended(
    loaded: LoadedModel, layout: Layout, row: ResolvedRow, blend: Blend, kv_lookup: KVLookup | None
) -> PrefilledGroup:
    """Encode or find passages, move them to their positions, recompute a fraction of their tokens, read the suffix.

    Cost with all segments cached: the first layers of the whole prompt (``query``: the question), a fraction of the
    prompt in all layers, the suffix.
    """
    kv, cached = encode_passages(loaded, layout, [independent_row(layout, row)], kv_lookup)
    batch = _move_passages(loaded, row, kv)
    chosen = _tokens_to_recompute(loaded, row, batch, blend)
    if len(chosen):
        _recompute(loaded, row, batch, chosen)
    start, observer = row.layout.suffix.start, Observer()
    ids = torch.tensor([row.layout.token_ids[start:]], device=loaded.device)
    read = prefill_question(batch, ids, row.positions[:, start:], layout, 1, observer)
    return prefilled_group(batch, read, layout, [row], observer, max(0, cached - len(chosen)))


def independent_row(layout: Layout, row: ResolvedRow) -> ResolvedRow:
    """Return the row with every passage at the positions right after the prefix."""
    return replace(row, positions=window_positions(layout, windows_of(layout, None)))


def _move_passages(loaded: LoadedModel, row: ResolvedRow, kv: dict[tuple[int, float], Tensor]) -> SequenceBatch:
    """Return a batch that holds prefix and passages, keys rotated to their positions in the prompt."""
    first = len(row.layout.prefix)
    segments = [kv[-1, 0.0]] if first else []
    for passage, span in row.passage_spans:
        if len(span):
            keys, values = kv[passage, float(first)]
            segments.append(torch.stack((rerotate(loaded.spec, keys, span.start - first), values)))
    length = row.layout.suffix.start
    return concatenate_kv(loaded, [segments], [row.positions[:, :length]], len(row.layout.suffix), row.overrides)


def _tokens_to_recompute(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch, blend: Blend) -> Tensor:
    """Return which tokens are recomputed, (n,) int64; the first layers of all tokens are recomputed on the way."""
    if blend.by == "first":
        spans = [(span.start, span.stop) for _, span in row.passage_spans]
        return first_tokens(spans, blend.fraction).to(loaded.device)
    start = len(row.layout.prefix)
    if blend.by == "query":
        return largest(_question_attention(loaded, row, batch), start, blend.fraction)
    fresh = _first_layers(loaded, row, blend.layers)
    last = blend.layers - 1
    deviations = deviation(fresh.layers[last].values, batch.cache.layers[last].values)
    chosen = largest(loaded.spec.ranks.mean(deviations), start, blend.fraction)
    for old, new in zip(batch.cache.layers[: blend.layers], fresh.layers, strict=False):
        old.keys.copy_(new.keys)
        old.values.copy_(new.values)
    return chosen


def _question_attention(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch) -> Tensor:
    """Return the mean attention of the question to each token before the suffix, (T,), over layers, heads, its tokens.

    A question that stands before the passages cannot see them: the suffix is read in its place.
    """
    start, question = row.layout.suffix.start, row.layout.question
    if question.start < start:
        question = row.layout.suffix
    observer = Observer(queries=len(question))
    ids = torch.tensor([row.layout.token_ids[start : question.stop]], device=loaded.device)
    batch.branch().forward(ids, row.positions[:, start : question.stop], 1, observer)
    attended = observer.mean()
    if attended is None:
        raise GenerationError("no layer reported its attention; please report this")
    return loaded.spec.ranks.mean(attended)[0, :start]


class _EnoughLayers(Exception):
    """The first layers are computed."""


def _first_layers(loaded: LoadedModel, row: ResolvedRow, count: int) -> GrowingCache:
    """Return keys and values of prefix and passages in the first ``count`` layers, as the whole prompt has them."""
    length = row.layout.suffix.start
    cache = GrowingCache(loaded.spec.shape.n_layers)

    def stop(layer: int, _: Tensor) -> None:
        if layer == count:
            raise _EnoughLayers

    positions = row.positions[:, :length].to(loaded.device)
    context = ForwardContext(positions=positions, spec=loaded.spec, on_hidden_states=stop, starts=(0,))
    ids = torch.tensor([row.layout.token_ids[:length]], device=loaded.device)
    try:
        run_model(loaded, context, cache, ids, positions.long(), 1)
    except _EnoughLayers:
        return cache
    if count < loaded.spec.shape.n_layers:
        raise GenerationError("the model did not stop at the layer that it was asked to; please report this")
    return cache


class _OverwritingCache(GrowingCache):
    """A cache whose update replaces the tokens ``chosen``."""

    def __init__(self, held: GrowingCache, chosen: Tensor) -> None:
        super().__init__(0)
        self.layers = held.layers
        self._chosen = chosen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        layer.keys[:, :, self._chosen] = key_states
        layer.values[:, :, self._chosen] = value_states
        return layer.keys, layer.values


def _recompute(loaded: LoadedModel, row: ResolvedRow, batch: SequenceBatch, chosen: Tensor) -> None:
    """Replace keys and values of tokens ``chosen`` by their values after all tokens before them."""
    context = ForwardContext(
        Overrides(attend=SelectedAttention(chosen)),
        batch.positions,
        loaded.spec,
        prompt_length=batch.length,
        starts=(0,),
    )
    ids = torch.tensor([row.layout.token_ids], device=loaded.device)[:, chosen]
    run_model(
        loaded,
        context,
        _OverwritingCache(batch.cache, chosen),
        ids,
        row.positions.to(loaded.device)[:, chosen].long(),
        1,
    )
