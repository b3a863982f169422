"""Token attribution: which passages each token of an answer comes from, tracked while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import SequenceBatch
from rag_posfix.patching.forward_context import Observer

LAYERS = 4


def attribution_layers(n_layers: int) -> frozenset[int]:
    """Return the layers whose attention is tracked: four, evenly through the upper half.

    All of them would cost an eighth of a decode step and more; the lower half looks at neighbours mostly.
    """
    upper = n_layers - n_layers // 2
    count = min(LAYERS, upper)
    return frozenset(n_layers // 2 + index * upper // count for index in range(count))


class AttributionTracker:
    """Tracks the shares of the passages in each token that one session generates.

    Rows that hold one passage each need no attention: their weights in the plan are the shares.

    ``attention`` (R, N) is the passages' shares in the attention of the prompt's last token, row by row.
    """

    def __init__(self, batches: Sequence[SequenceBatch], attention: Tensor) -> None:
        self._batches = list(batches)
        self._current = attention
        self._weights: Tensor | None = None
        self._shares: list[Tensor] = []
        self._segments = [_segments(batch, attention.shape[1]) for batch in self._batches]
        self._layers = attribution_layers(self._batches[0].loaded.spec.shape.n_layers)

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next forward pass, for each group."""
        return [
            None if segments is None else Observer(layers=self._layers, approximate=True)
            for segments in self._segments
        ]

    def weigh_rows(self, weights: Tensor) -> None:
        """Set the (R,) weights with which the rows choose the next token; the last call before ``take`` counts."""
        self._weights = weights

    def take(self, observers: Sequence[Observer | None]) -> None:
        """Count the token that was chosen, and take the attention of the pass that read it from its ``observers()``.

        Without observers the shares stay as they are.
        """
        self._count()
        if not observers:
            return
        counts = [batch.n_rows for batch in self._batches]
        current = list(torch.split(self._current, counts))
        for index, (segments, observer) in enumerate(zip(self._segments, observers, strict=True)):
            attended = None if observer is None else observer.mean()
            if segments is not None and attended is not None:
                current[index] = _shares(attended, segments, self._current.shape[1])
        self._current = torch.cat(current)

    def shares(self) -> list[tuple[float, ...]]:
        """Return the shares of every token, the last one included."""
        self._count()
        if not self._shares:
            return []
        return [tuple(row) for row in torch.stack(self._shares).tolist()]

    def _count(self) -> None:
        if self._weights is not None:
            self._shares.append((self._weights[:, None] * self._current).sum(dim=0))
            self._weights = None


def can_attribute(batches: Sequence[SequenceBatch]) -> bool:
    """Return whether these rows' tokens can be attributed to passages.

    Not where a model is split over processes, each of which sees its own heads only, nor where a layer forgets keys.
    """
    return all(
        batch.loaded.spec.ranks.count == 1 and (batch.loaded.keeps_all_keys or holds_one_each(batch))
        for batch in batches
    )


def holds_one_each(batch: SequenceBatch) -> bool:
    """Return whether no row holds two passages: then no attention need be looked at."""
    return all(len(held) < 2 for held in batch.passage_spans)


def _segments(batch: SequenceBatch, n_passages: int) -> Tensor | None:
    """Return each cached token's passage, (R, length), N outside of passages; None if no row holds two passages."""
    if holds_one_each(batch):
        return None
    segments = torch.full((batch.n_rows, batch.length), n_passages, dtype=torch.long)
    for row, held in enumerate(batch.passage_spans):
        for passage, start, stop in held:
            segments[row, start:stop] = passage
    return segments.to(batch.positions.device)


def _shares(attended: Tensor, segments: Tensor, n_passages: int) -> Tensor:
    """Return (R, N) shares from the attention to all tokens, (R, Tk); generated ones come last and do not count."""
    mass = attended.new_zeros((attended.shape[0], n_passages + 1))
    mass.scatter_add_(1, segments, attended[:, : segments.shape[1]])
    total = mass[:, :-1].sum(dim=1, keepdim=True)
    return mass[:, :-1] / total.where(total > 0, 1.0)
