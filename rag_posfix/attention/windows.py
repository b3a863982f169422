"""Windows of passages that do not see each other: positions, mask, and attention window by window."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rag_posfix.attention.blockwise import attend_segments
from rag_posfix.attention.masks import windows_mask
from rag_posfix.plan.attention_override import AttentionInput, AttentionOverride
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import MaskFunction

Indentation = Literal["left", "right"]


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
    pieces = [torch.arange(start)]
    for window in windows:
        first = start + (longest - len(window) if indentation == "right" else 0)
        pieces.append(first + torch.arange(len(window)))
    pieces.append(start + longest + torch.arange(len(layout.suffix)))
    return torch.cat(pieces).float()[None]


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
        self.plain_from = layout.suffix.start

    def __call__(self, given: AttentionInput) -> tuple[Tensor, Tensor | None]:
        """AttentionOverride window by window; the whole prompt arrives in one pass."""
        query, key, value, end = given.query, given.key, given.value, self.plain_from or 0
        outs = []
        for start, stop, seen in self._segments(end, query.shape[2]):
            if start < stop:
                part = query[:, :, start:stop]
                outs.append(attend_segments(part, key, value, given.scaling, start, seen)[0])
        return torch.cat(outs, dim=2), None

    def visible(self, n_tokens: int) -> Tensor | None:
        """Return the windows' mask."""
        at = torch.arange(n_tokens)
        return self._mask(at[:, None], at[None, :])

    def _segments(self, end: int, n_tokens: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
        """Return (first, last excluded, segments it sees) of prefix, windows and suffix."""
        prefix = (0, self._prefix)
        windows = [(window.start, window.stop, [prefix]) for window in self._windows]
        return [(0, self._prefix, []), *windows, (end, n_tokens, [(0, end)])]
