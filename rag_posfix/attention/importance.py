"""How much tokens and documents matter to each other without regard to position, and what that says of their places."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distances", "document_importance", "shares", "token_importance"]

ROWS = 256
"""Queries scored at a time: bounds the score tensor."""


def shares(lengths: Tensor) -> Tensor:
    """Return 1 / n_j where a token belongs to document j and 0 elsewhere, (sum of n_j, N) float32.

    Shapes:
        lengths: (N,).
    """
    of_token = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return torch.nn.functional.one_hot(of_token, len(lengths)).float() / lengths


def token_importance(query: Tensor, key: Tensor, share: Tensor, scaling: float) -> Tensor:
    """Return how much each document matters to each query token: its mean attention without positions.

    Source: Wang et al. (2024), Eliminating Position Bias of Language Models, section 3.3,
        https://arxiv.org/abs/2407.01100
    Formula: s(n) = softmax_n(q^T k_n scaling) over the tokens of all documents; Imp(j) = sum_{n in j} s(n) / n_j.

    Shapes:
        query: (H, R, D) and key: (H, S, D), unrotated float32. share: (S, N), see ``shares``. returns: (H, R, N).
    """
    return torch.matmul(query * scaling, key.transpose(1, 2)).softmax(dim=-1) @ share


def document_importance(query: Tensor, key: Tensor, share: Tensor, own: slice, scaling: float) -> Tensor:
    """Return how much each other document matters to the document ``own``, in each head.

    Source: as ``token_importance``.
    Formula: s(m, n) = softmax_n(q_m^T k_n scaling) over the tokens n of other documents;
        Imp(j) = sum_{m in own} sum_{n in j} s(m, n) / n_j.

    Cost: ``ROWS`` x S scores at a time.

    Shapes:
        query: (Hq, n, D), the document's tokens, and key: (Hkv, S, D), all documents' tokens; unrotated float32.
        share: (S, N). returns: (Hq, N) float32; 0 for the document itself.
    """
    groups = query.shape[0] // key.shape[0]
    mass = query.new_zeros(query.shape[0], key.shape[1])  # (Hq, S), what each token gets from the whole document
    for head, states in enumerate(query * scaling):
        other = key[head // groups].t()
        for rows in states.split(ROWS):
            scores = rows @ other  # (rows, S)
            scores[:, own] = float("-inf")
            mass[head] += scores.new_ones(1, len(rows)).mm(scores.softmax(dim=-1))[0]
    return mass @ share


def distances(importance: Tensor, lengths: Tensor) -> Tensor:
    """Return how far before the end of the documents each begins when the most important one stands last.

    Formula: distance(j) = n_j + sum of the lengths of all documents more important than j. Of two that are equally
        important the one with the lower index counts as more important.

    Shapes:
        importance: (..., N). lengths: (N,). returns: (..., N) float32.
    """
    order = importance.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(importance).scatter(-1, order, lengths.float()[order].cumsum(dim=-1))
