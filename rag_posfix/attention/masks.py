"""Masks as predicates over (query index, key index), and windows of passages that do not see each other.

Attention over segments of keys, merged by log-sum-exp, and causal attention of the last tokens: no T x T tensor.

How much attention the last queries pay to each key.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import ClassVar, Literal

from rag_posfix.lazy_torch import Tensor, torch
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, MaskFunction

QUERY_BLOCK = 256
"""Queries per block where no fused kernel returns the log-sum-exp, which bounds the score tensor, and where the keys
before a block are read by products."""


SAMPLED_KEYS = 32
"""Keys whose scores say how high the scores of a query are."""

PRODUCTS_FROM = 2**16
"""Scores of a key head from which products take less time than the fused kernel."""

MAX_SCORES = 2**21
"""Scores that products have at a time: they stay in the processor's cache."""

FOLD_FROM = 32
"""Queries from which the heads of a group are computed as more queries of one head: larger units of work. So is a
single query, for which the keys would be read once for every head of the group."""


def attend_with_lse(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return softmax(QK^T scaling)V and the log-sum-exp of each query's scores.

    Source: Dao et al. (2022), FlashAttention, section 3.1, https://arxiv.org/abs/2205.14135

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D); query head h reads key head h // (Hq / Hkv).
        returns: (B, Hq, Tq, D) in the dtype of ``query``; (B, Hq, Tq) float32.

    With ``causal``, query i sees keys 0..i + Tk - Tq: the queries are the last tokens. The numbers of a vector must be
    neighbours in memory: the kernels do not look at the stride of D. Without keys the output is 0 and its lse -inf.

    Cost: fused on CPUs, and on GPUs by the kernels that PyTorch's own attention uses: flash attention in 16 bits, the
        memory-efficient one in float32. Elsewhere, and where gradients are enabled, a (B, Hq, 256, Tk) float32 score
        tensor at a time: the fused kernels have no gradient of the log-sum-exp.
    """
    n_query, n_key = query.shape[2], key.shape[2]
    key, value = key.to(query.dtype), value.to(query.dtype)  # under autocast queries are rotated in float32
    if not n_query or not n_key:  # the fused kernel divides by both
        return torch.zeros_like(query), query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)
    causal = causal and n_query > 1
    if causal and n_query < n_key:  # the fused kernel aligns its diagonal with the first key
        past = n_key - n_query
        return merge(
            [
                attend_with_lse(query, key[:, :, :past], value[:, :, :past], scaling),
                attend_with_lse(query, key[:, :, past:], value[:, :, past:], scaling, causal=True),
            ]
        )
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        return _attend_in_blocks(query, key, value, scaling, causal)
    kernel = LSE_KERNELS.get(query.device.type, _attend_in_blocks)
    return kernel(query, key, value, scaling, causal)


def attend_whole(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse`` without its causal mask, by products where they are faster.

    They are in bfloat16 on CPUs without matrix units. Scores are rounded to bfloat16 as distances from the highest of
    a sample, so that the largest, which matter, are rounded least. The error is about twice that of the fused kernel,
    whose scores are float32. Where an exponential overflows the fused kernel computes the call.

    Formula: c = max of q k scaling over every (Tk / 32)th key; e = exp(q k scaling - c); out = e V / sum e;
        lse = c + log sum e.

    Cost: a bfloat16 tensor of at most 2 million scores at a time.
    """
    rows, n_key = query.shape[1] // key.shape[1] * query.shape[2], key.shape[2]
    if not _products_are_faster(query, rows * n_key):
        return attend_with_lse(query, key, value, scaling)
    queries = query.reshape(-1, rows, query.shape[3])  # (B Hkv, G Tq, D)
    keys, values = (states.to(query.dtype).flatten(0, 1) for states in (key, value))
    sample = keys[:, :: max(1, n_key // SAMPLED_KEYS)].transpose(1, 2)
    near = ((queries @ sample) * scaling).amax(dim=2, keepdim=True)
    out, total = torch.empty_like(queries), torch.empty_like(near)
    block = max(1, MAX_SCORES // n_key)
    kept = query.new_empty(min(block, rows), n_key)
    for head, first in itertools.product(range(len(queries)), range(0, rows, block)):
        at = head, slice(first, first + block)
        scores = kept[: len(near[at])]
        torch.addmm(near[at], queries[at], keys[head].T, beta=-1, alpha=scaling, out=scores).exp_()
        torch.mm(scores, values[head], out=out[at])
        torch.sum(scores, dim=1, keepdim=True, out=total[at])
    lse = total.float().log_()
    if not lse.isfinite().all():
        return attend_with_lse(query, key, value, scaling)
    return out.div_(total).reshape(query.shape), lse.add_(near).reshape(query.shape[:3])


def attend_prompt_with_lse(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse`` with its causal mask, for as many queries as keys.

    Where products are faster, a block of queries reads all keys before it by ``attend_whole``.
    """
    n_query = query.shape[2]
    if not _products_are_faster(query, n_query * n_query):
        return attend_with_lse(query, key, value, scaling, causal=True)
    blocks = []
    for first in range(0, n_query, QUERY_BLOCK):
        rows = query[:, :, first : first + QUERY_BLOCK]
        blocks.append(attend_segments(rows, key, value, scaling, first, [(0, first)]))
    out, lse = (torch.cat(states, dim=2) for states in zip(*blocks, strict=True))
    return out, lse


def _products_are_faster(query: Tensor, n_scores: int) -> bool:
    """Return whether ``attend_whole`` takes less time by products for so many scores of a key head."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return n_scores >= PRODUCTS_FROM and multiplies_without_matrix_units()


@functools.cache
def multiplies_without_matrix_units() -> bool:
    """Return whether the processor multiplies bfloat16 by vector instructions alone."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16")) and not able.get("amx_tile")


def has_lse_kernel(device: torch.device) -> bool:
    """Return whether a fused kernel returns the log-sum-exp on a device."""
    return device.type in LSE_KERNELS


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse`` by the CPU's flash attention."""
    n_query = query.shape[2]
    if query.shape[1] > key.shape[1] and (n_query == 1 or (not causal and n_query >= FOLD_FROM)):
        return _attend_folded(query, key, value, scaling)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scaling
    )
    return out, lse


def _attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse`` by the fastest kernel that takes these tensors on this GPU."""
    gqa = query.shape[1] != key.shape[1]
    if gqa and query.shape[2] == 1:
        return _attend_folded(query, key, value, scaling)
    kernels = torch.backends.cuda
    if kernels.can_use_flash_attention(kernels.SDPAParams(query, key, value, None, 0.0, causal, gqa)):
        return flash(query, key, value, scaling, causal)
    if gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if kernels.can_use_efficient_attention(kernels.SDPAParams(query, key, value, None, 0.0, causal, False)):
        return efficient(query, key, value, scaling, causal)
    return _attend_in_blocks(query, key, value, scaling, causal)


def flash(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of PyTorch's flash attention; key heads may be fewer than query heads."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scaling)[:2]
    return out, lse


def efficient(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of PyTorch's memory-efficient attention, which pads the latter."""
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scaling
    )[:2]
    return out, lse[..., : query.shape[2]]


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse``: the query heads of a group become more queries of one head."""
    folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, Hkv, G Tq, D)
    out, lse = attend_with_lse(folded, key, value, scaling)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


LSE_KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]] = {
    "cpu": _attend_on_cpu,
    "cuda": _attend_on_gpu,
}
"""Attention with its log-sum-exp by the type of the device; elsewhere it is computed in blocks."""


def merge(segments: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return attention over the union of disjoint segments of keys.

    Formula: w_g = softmax_g(lse_g); out = sum_g w_g out_g; lse = logsumexp_g(lse_g).

    Shapes:
        segments: (B, Hq, Tq, D) and (B, Hq, Tq) each.
        returns: the same shapes, in the dtype of the first output.
    """
    if len(segments) == 1:
        return segments[0]
    if len(segments) == 2:
        (out, lse), (other_out, other_lse) = segments
        weight = (other_lse - lse).sigmoid_().unsqueeze(-1)
        merged = torch.lerp(out.to(weight.dtype), other_out.to(weight.dtype), weight)
        return merged.to(out.dtype), torch.logaddexp(lse, other_lse)
    lses = torch.stack([lse for _, lse in segments])
    total = lses.logsumexp(dim=0)
    weights = (lses - total).exp().unsqueeze(-1).unbind()
    out = segments[0][0].float() * weights[0]
    for (segment_out, _), weight in zip(segments[1:], weights[1:], strict=True):
        out.addcmul_(segment_out.float(), weight)
    return out.to(segments[0][0].dtype), total


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, start: int, segments: Iterable[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Return attention of the tokens ``start``.. over whole segments of keys and, causally, over themselves.

    ``segments`` are (first, last excluded) of the keys that every query sees; empty ones are skipped.

    Shapes:
        query: (B, Hq, Tq, D), the tokens start..start + Tq - 1. key, value: (B, Hkv, Tk, D), from token 0.
    """
    stop = start + query.shape[2]
    outs = [
        attend_whole(query, key[:, :, first:last], value[:, :, first:last], scaling)
        for first, last in segments
        if first < last
    ]
    outs.append(attend_with_lse(query, key[:, :, start:stop], value[:, :, start:stop], scaling, causal=True))
    return merge(outs)


def last_row(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the scores of the last query, (B, Hq, 1, Tk) float32."""
    return scores(query[:, :, -1:], key, scaling)


def scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return QK^T scaling, materialised. For few queries.

    Shapes:
        query: (B, Hq, Tq, D). key: (B, Hkv, Tk, D). returns: (B, Hq, Tq, Tk) float32.
    """
    n_key = key.shape[2]
    grouped = _by_key_head(query.float(), key.shape[1])  # (B, Hkv, G Tq, D)
    return (grouped @ key.float().transpose(-1, -2) * scaling).view(*query.shape[:3], n_key)


def weigh(probabilities: Tensor, value: Tensor) -> Tensor:
    """Return the values weighted by materialised attention. For few queries.

    Shapes:
        probabilities: (B, Hq, Tq, Tk). value: (B, Hkv, Tk, D). returns: (B, Hq, Tq, D) in the dtype of ``value``.
    """
    grouped = _by_key_head(probabilities.float(), value.shape[1])  # (B, Hkv, G Tq, Tk)
    return (grouped @ value.float()).view(*probabilities.shape[:3], value.shape[3]).to(value.dtype)


def _by_key_head(states: Tensor, n_kv_heads: int) -> Tensor:
    """Stack the query heads that share a key head: (B, Hq, Tq, X) -> (B, Hkv, G Tq, X)."""
    return states.reshape(states.shape[0], n_kv_heads, -1, states.shape[3])


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the same as ``attend_with_lse``, with materialised logits."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1).float() for states in (key, value))
    outs, lses = [], []
    for first in range(0, query.shape[2], QUERY_BLOCK):
        block = query[:, :, first : first + QUERY_BLOCK].float()
        logits = block @ key.transpose(-1, -2) * scaling  # (B, Hq, block, Tk)
        if causal:
            rows = torch.arange(first, first + block.shape[2], device=query.device)[:, None]
            logits = logits.masked_fill(torch.arange(key.shape[2], device=query.device) > rows, float("-inf"))
        lses.append(logits.logsumexp(dim=-1))
        outs.append(logits.softmax(dim=-1) @ value)
    return torch.cat(outs, dim=2).to(query.dtype), torch.cat(lses, dim=2)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Return causal softmax(QK^T scaling)V, where the queries are the last Tq of the Tk tokens.

    A whole prompt (Tq = Tk) is computed by the call that transformers' own SDPA path makes. A single token is computed
    with the query heads of a group as queries of one head, so that no key is read twice. In between, keys of the past
    and of the queries are attended to separately and merged.

    Shapes:
        query: (B, Hq, Tq, D). key, value: (B, Hkv, Tk, D), Tk >= Tq. returns: (B, Hq, Tq, D).

    Cost: no (Tq, Tk) tensor on CPUs and GPUs; elsewhere a bool one where 1 < Tq < Tk.
    """
    n_query, n_key = query.shape[2], key.shape[2]
    if n_query == 1:
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # (B, Hkv, Hq / Hkv, D)
        return torch.nn.functional.scaled_dot_product_attention(folded, key, value, scale=scaling).reshape(query.shape)
    gqa = query.shape[1] != key.shape[1]
    if n_query == n_key:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa
        )
    if has_lse_kernel(query.device):
        return attend_with_lse(query, key, value, scaling, causal=True)[0]
    index = torch.arange(n_key, device=key.device)
    mask = index[None, :] <= index[n_key - n_query :, None]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa
    )


def attend_causal_rows(query: Tensor, key: Tensor, value: Tensor, scaling: float, starts: Sequence[int]) -> Tensor:
    """Return the same where row b has no tokens before ``starts[b]``: neighbours with equal starts share a call."""
    groups = list(runs(starts))
    if not any(starts):
        return attend_causal(query, key, value, scaling)
    if len(groups) == 1:
        return attend_causal(query, key[:, :, starts[0] :], value[:, :, starts[0] :], scaling)
    return torch.cat(
        [attend_causal(query[rows], key[rows, :, start:], value[rows, :, start:], scaling) for rows, start in groups]
    )


def runs(starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Yield neighbouring rows with equal starts, and that start."""
    first = 0
    for start, group in itertools.groupby(starts):
        last = first + len(list(group))
        yield slice(first, last), start
        first = last


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Let a token see itself and all before it."""
    return key <= query


def block_diagonal_mask(masks: Sequence[MaskFunction], lengths: Sequence[int]) -> MaskFunction:
    """Return the mask of concatenated prompts: each has its own mask and does not see the other prompts.

    Args:
        masks: The mask of each prompt, whose tokens count from 0.
        lengths: Tokens of each prompt; there are no others.

    Cost: each mask is evaluated for the tokens of its own prompt alone; a T x T bool tensor, T the tokens of all.
    """

    def mask(query: Tensor, key: Tensor) -> Tensor:
        blocks = [materialize(block_mask, n, n, query.device) for block_mask, n in zip(masks, lengths, strict=True)]
        full: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return full[query, key]

    return mask


def segment_ids(layout: Layout, windows: Sequence[Span]) -> Tensor:
    """Return which segment each token belongs to: 0 prefix, 1..B windows, B + 1 suffix. Shape (T,)."""
    lengths = [len(layout.prefix), *(len(window) for window in windows), len(layout.suffix)]
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def windows_mask(layout: Layout, windows: Sequence[Span]) -> MaskFunction:
    """Let a window see the prefix and itself; suffix and generated tokens see everything before them.

    Source: Ratner et al. (2023), Parallel Context Windows, section 3, https://arxiv.org/abs/2212.10947
    """
    segments = segment_ids(layout, windows)
    suffix = len(windows) + 1

    def mask(query: Tensor, key: Tensor) -> Tensor:
        last = segments.shape[0] - 1
        of_query = segments.to(query.device)[query.clamp(max=last)]  # generated tokens belong to the suffix
        of_key = segments.to(key.device)[key.clamp(max=last)]
        return (key <= query) & ((of_query == suffix) | (of_key == 0) | (of_key == of_query))

    return mask


def materialize(mask: MaskFunction, n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
    """Return ``mask`` as a matrix for the last ``n_query`` of ``n_key`` tokens. Shape (n_query, n_key), bool."""
    query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
    key = torch.arange(n_key, device=device)[None, :]
    return mask(query, key)


Indentation = Literal["left", "right"]


def causal_rows(starts: Sequence[int], n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask of rows whose tokens before ``starts`` are padding. Shape (R, 1, n_query, n_key), bool.

    The queries are the last tokens.
    """
    causal = materialize(causal_mask, n_query, n_key, device)
    first = torch.tensor(starts, device=device)[:, None, None, None]
    return causal & (torch.arange(n_key, device=device) >= first)


def windows_of(layout: Layout, count: int | None) -> tuple[Span, ...]:
    """Return ``count`` windows of neighbouring passages, as even in number of passages as can be; None = one each.

    Windows without passages are left out.
    """
    n = layout.n_passages
    count = n if count is None else min(count, n)
    bounds = [round(i * n / count) for i in range(count + 1)] if count else [0]
    return tuple(
        Span(layout.passages[first].start, layout.passages[last - 1].stop)
        for first, last in itertools.pairwise(bounds)
    )


def window_positions(layout: Layout, windows: Sequence[Span], indentation: Indentation = "left") -> Tensor:
    """Return positions where all windows share one range and the suffix follows the longest.

    Formula: prefix 0..P-1; token t of a window P + t (left) or P + max(n) - n + t (right); token t of the suffix
        P + max(n) + t.

    Shapes:
        returns: (1, T) float32.
    """
    start = len(layout.prefix)
    longest = max((len(window) for window in windows), default=0)
    positions = [torch.arange(start)]
    for window in windows:
        first = start + (longest - len(window) if indentation == "right" else 0)
        positions.append(first + torch.arange(len(window)))
    positions.append(start + longest + torch.arange(len(layout.suffix)))
    return torch.cat(positions).float()[None]


class WindowedAttention(AttentionOverride):
    """A window sees the prefix and, causally, itself; the suffix and generated tokens see everything.

    The same as ``windows_mask``, without a T x T tensor.
    """

    needs_mask: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True

    def __init__(self, layout: Layout, windows: Sequence[Span]) -> None:
        self._prefix = len(layout.prefix)
        self._windows = tuple(windows)
        self._mask: MaskFunction = windows_mask(layout, windows)
        self.standard_from = layout.suffix.start

    def __call__(self, inputs: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """Attend window by window; the prompt arrives in one pass."""
        query, key, value, end = inputs.query, inputs.key, inputs.value, self.standard_from or 0
        outs = []
        for start, stop, seen in self._segments(end, query.shape[2]):
            if start < stop:
                window = query[:, :, start:stop]
                outs.append(attend_segments(window, key, value, inputs.scaling, start, seen)[0])
        return torch.cat(outs, dim=2), None

    def visible(self, n_tokens: int) -> Tensor | None:
        """Return the windows' mask."""
        index = torch.arange(n_tokens)
        return self._mask(index[:, None], index[None, :])

    def _segments(self, end: int, n_tokens: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Return (first, last excluded, segments it sees) of prefix, windows and suffix."""
        prefix = (0, self._prefix)
        windows = [(window.start, window.stop, [prefix]) for window in self._windows]
        return [(0, self._prefix, []), *windows, (end, n_tokens, [(0, end)])]


def pseudo_log_mass(rows: Tensor, n_tokens: int, gamma: float) -> Tensor:
    """Return the log-sum-exp of the pseudo-scores of each row, -inf for a row without any.

    Formula: row i (from 1) of n: log sum_{j = i + 1}^{n} exp(-gamma (j - 1)), a geometric series of n - i terms:
        -gamma i + log(1 - exp(-gamma (n - i))) - log(1 - exp(-gamma)).

    Source: Yin et al. (2024), StableMask, https://arxiv.org/abs/2402.04779

    Shapes:
        rows: (Tq,) indices from 0. returns: (Tq,) float32.
    """
    terms = (n_tokens - 1 - rows).clamp(min=0).float()
    series = (-torch.expm1(-gamma * terms)).log() - math.log(-math.expm1(-gamma))
    return series - gamma * (rows + 1).float()


ROWS = 64
"""Number of queries whose attention is materialised at a time."""


def last_query_attention(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    starts: Sequence[int] | None = None,
    count: int = 1,
    sinks: Tensor | None = None,
    *,
    approximate: bool = False,
) -> Tensor:
    """Return the attention probabilities of the last ``count`` queries, averaged over them and over heads, in float32.

    ``approximate`` multiplies queries and keys in their own dtype, which spares a float32 copy of all keys: for
    shares.

    Cost: the requested rows of the score matrix, at most 64 at a time: (B, Hq, 64, Tk).

    Shapes:
        query: (B, Hq, Tq, D), the last of the tokens that the keys belong to. key: (B, Hkv, Tk, D).
        attention_mask: (B, 1, Tq, Tk), bool or additive; None is causal.
        starts: the first key of each row; keys before it get 0.
        sinks: (Hq,) scores of a column without a value, whose probability is left out.
        returns: (B, Tk), each row sums to 1, less the sinks.
    """
    blocks = _row_blocks(query, key, attention_mask, scaling, softcap, sinks, starts, count, approximate)
    return reduce(torch.add, [probabilities.mean(dim=(1, 2)) * share for probabilities, share in blocks])


def head_attention(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    heads: Sequence[int],
    softcap: float | None = None,
    starts: Sequence[int] | None = None,
    count: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention probabilities of the last ``count`` queries in some heads, averaged over the queries.

    Cost: as ``last_query_attention``, for these heads alone.

    Shapes: as ``last_query_attention``.
        heads: query heads, from 0.
        returns: (B, len(heads), Tk) float32, each row sums to 1, less the sinks.
    """
    per_key = query.shape[1] // key.shape[1]
    query, key = query[:, list(heads)], key[:, [head // per_key for head in heads]]
    sinks = None if sinks is None else sinks[list(heads)]
    blocks = _row_blocks(query, key, attention_mask, scaling, softcap, sinks, starts, count, approximate=False)
    return reduce(torch.add, [probabilities.mean(dim=2) * share for probabilities, share in blocks])


def _row_blocks(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    starts: Sequence[int] | None,
    count: int,
    approximate: bool,
) -> Iterator[tuple[Tensor, float]]:
    """Yield the probabilities of some of the last queries, (B, Hq, R, Tk), and their share of the ``count``."""
    n_query = query.shape[2]
    for start in range(n_query - count, n_query, ROWS):
        stop = min(start + ROWS, n_query)
        rows = query[:, :, start:stop]
        score = _approximate_scores if approximate else scores
        logits = score(rows, key, scaling)  # (B, Hq, stop - at, Tk)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = _masked(logits, mask, n_query - stop)
        if starts is not None and any(starts):
            for rows_alike, first in runs(starts):  # slices, not a mask: a mask would be an upload in every layer
                if first:
                    logits[rows_alike, :, :, :first] = float("-inf")
        if sinks is None:
            yield logits.softmax(dim=-1), (stop - start) / count
        else:
            column = sinks.float()[:, None, None].expand(*logits.shape[:3], 1)
            yield torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1], (stop - start) / count


def _masked(logits: Tensor, mask: Tensor | None, after: int) -> Tensor:
    """Hide what the queries do not see; ``after`` more queries follow them."""
    n_rows, n_key = logits.shape[2:]
    if mask is not None:
        stop = mask.shape[2] - after
        rows = mask[:, :, stop - n_rows : stop, :n_key]
        return logits.masked_fill(~rows, float("-inf")) if rows.dtype == torch.bool else logits + rows.float()
    if n_rows + after == 1:  # the last query sees every key
        return logits
    last_visible = torch.arange(n_key - after - n_rows, n_key - after, device=logits.device)[:, None]
    return logits.masked_fill(torch.arange(n_key, device=logits.device) > last_visible, float("-inf"))


def _approximate_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Return the scores of queries, (B, Hq, R, Tk) float32, multiplied in the dtype of the keys."""
    batch, heads, n_rows, channels = query.shape
    folded = query.reshape(batch, key.shape[1], -1, channels)  # (B, Hkv, Hq / Hkv R, D)
    return (folded @ key.transpose(-1, -2)).float().reshape(batch, heads, n_rows, -1) * scaling
