"""Attention over segments of keys, merged by log-sum-exp, and causal attention of the last tokens: no T x T tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256
"""Queries per block where no fused kernel returns the log-sum-exp, which bounds the score tensor, and where the keys
before a block are read by products."""


SAMPLED_KEYS = 32
"""Keys whose scores say how high the scores of a query are."""

PRODUCTS_FROM = 2**16
"""Scores of a key head from which products take less time than the fused kernel."""

MOST_SCORES = 2**21
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
    block = max(1, MOST_SCORES // n_key)
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
    if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, causal, gqa)):
        return flash(query, key, value, scaling, causal)
    if gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if can_use_efficient_attention(SDPAParams(query, key, value, None, 0.0, causal, False)):
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
        return scaled_dot_product_attention(folded, key, value, scale=scaling).reshape(query.shape)
    gqa = query.shape[1] != key.shape[1]
    if n_query == n_key:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    if has_lse_kernel(query.device):
        return attend_with_lse(query, key, value, scaling, causal=True)[0]
    index = torch.arange(n_key, device=key.device)
    mask = index[None, :] <= index[n_key - n_query :, None]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)


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
