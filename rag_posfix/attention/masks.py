"""Masks as predicates over (query index, key index), and windows of passages that do not see each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import attend_segments
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import AttentionInput, AttentionOverride, MaskFunction


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
