"""How much documents matter to tokens and to each other if positions did not exist, and where that puts them."""

from __future__ import annotations

import torch
from torch import Tensor

from rag_posfix.attention.causal import tiles


def shares(lengths: Tensor) -> Tensor:
    """Return 1 / n_j where a token belongs to document j and 0 elsewhere, (sum of n_j, N) float32.

    Shapes:
        lengths: (N,).
    """
    of_token = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return torch.nn.functional.one_hot(of_token, len(lengths)).float() / lengths.clamp(min=1)


def token_importance(query: Tensor, key: Tensor, share: Tensor, scaling: float) -> Tensor:
    """Return how much each document matters to each query token: its mean attention without positions.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: s(n) = softmax_n(q^T k_n scaling) over the tokens of all documents; Imp(j) = sum_{n in j} s(n) / n_j.

    Shapes:
        query: (H, R, D) and key: (H, S, D), unrotated float32. share: (S, N), see ``shares``. returns: (H, R, N).
    """
    return torch.matmul(query * scaling, key.transpose(1, 2)).softmax(dim=-1) @ share


def document_importance(query: Tensor, key: Tensor, share: Tensor, scaling: float) -> Tensor:
    """Return how much other documents matter to one document, in each head.

    Source: as ``token_importance``.
    Formula: s(m, n) = softmax_n(q_m^T k_n scaling) over the tokens n of the other documents;
        Imp(j) = sum_m sum_{n in j} s(m, n) / n_j over the tokens m of the one.

    Scores have the dtype of ``query``. In bfloat16 that moves importance by a few times what rounding queries and keys
    moved it. Documents are summed in float32: they seldom tie.

    Cost: ``causal.TILE_SCORES`` scores at a time.

    Shapes:
        query: (Hkv, G, n, D), the document's tokens, and key: (Hkv, S, D), the other documents', both unrotated.
        share: (S, N). returns: (Hkv, G, N) float32.
    """
    n_key_heads, groups, n_query, _ = query.shape
    mass = query.new_zeros((n_key_heads, groups, key.shape[1]), dtype=torch.float32)  # what each token gets from all m
    unused = query.new_zeros(1)
    for heads, rows in tiles(n_key_heads, groups, n_query, key.shape[1]):
        part = query[heads, :, rows].flatten(1, 2)  # (h, G rows, D)
        scores = torch.baddbmm(unused, part, key[heads].transpose(1, 2), beta=0, alpha=scaling)
        weights = scores.softmax(dim=-1).view(-1, rows.stop - rows.start, key.shape[1])  # (h G, rows, S)
        summed = torch.bmm(weights.new_ones(len(weights), 1, weights.shape[1]), weights)
        mass[heads].add_(summed.view(-1, groups, key.shape[1]))
    return mass @ share


def distances(importance: Tensor, lengths: Tensor) -> Tensor:
    """Return how far before the end of the documents each begins when the most important one is last.

    Formula: distance(j) = n_j + sum of the lengths of all documents more important than j. Of two that are equally
        important the one with the lower index counts as more important.

    Shapes:
        importance: (..., N). lengths: (N,). returns: (..., N) float32.
    """
    order = importance.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(importance).scatter(-1, order, lengths.float()[order].cumsum(dim=-1))
