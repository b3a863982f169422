"""Masks as predicates over (query index, key index). A ``..._mask`` is complete; nothing else needs to be added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import MaskFunction


def causal_mask(query: Tensor, key: Tensor) -> Tensor:
    """Let a token see itself and all before it."""
    return key <= query


def block_diagonal_mask(masks: Sequence[MaskFunction], lengths: Sequence[int]) -> MaskFunction:
    """Return the mask of prompts that stand one after another: each has its own mask and sees nothing of the others.

    Args:
        masks: The mask of each prompt, whose tokens count from 0.
        lengths: Tokens of each prompt; there are no others.

    Cost: each mask is asked about the tokens of its own prompt alone; a T x T bool tensor, T the tokens of all.
    """

    def mask(query: Tensor, key: Tensor) -> Tensor:
        blocks = [materialize(own, n, n, query.device) for own, n in zip(masks, lengths, strict=True)]
        whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return whole[query, key]

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
