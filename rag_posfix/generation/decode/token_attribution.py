"""Which passages the tokens of an answer come from, followed while they are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rag_posfix.generation.model.sequence_batch import Rows
from rag_posfix.patching.call import Observer

__all__ = ["TokenTrace", "can_be_traced", "watched_layers"]

WATCHED = 4


def watched_layers(n_layers: int) -> frozenset[int]:
    """Return the layers whose attention is looked at: four, evenly through the upper half.

    All of them would cost an eighth of a decode step and more; the lower half looks at neighbours mostly.

    Args:
        n_layers: Layers of the model.
    """
    upper = n_layers - n_layers // 2
    count = min(WATCHED, upper)
    return frozenset(n_layers // 2 + index * upper // count for index in range(count))


class TokenTrace:
    """Follows the shares of the passages in each token that one session writes.

    Rows that hold one passage each need no attention: what counts is how much the plan lets each row say.

    Args:
        groups: The session's rows.
        attention: (R, N) the passages' shares in what the prompt's last token attends to, row by row.
    """

    def __init__(self, groups: Sequence[Rows], attention: Tensor) -> None:
        self._groups = list(groups)
        self._now = attention
        self._weights: Tensor | None = None
        self._shares: list[Tensor] = []
        self._segments = [_segments(rows, attention.shape[1]) for rows in self._groups]
        layers = self._groups[0].loaded.spec.shape.n_layers
        self._layers = watched_layers(layers)

    def observers(self) -> list[Observer | None]:
        """Return what must receive the attention of the next forward pass, for each group."""
        return [None if segments is None else Observer(layers=self._layers, rough=True) for segments in self._segments]

    def chosen_by(self, weights: Tensor) -> None:
        """Tell with which weights the rows choose the next token; the last call before ``take`` counts.

        Shapes:
            weights: (R,), sums to 1.
        """
        self._weights = weights

    def take(self, observers: Sequence[Observer | None]) -> None:
        """Count the token that was chosen, and take what the pass that read it attended to.

        Args:
            observers: Those of ``observers``, after the pass; none leaves the shares as they are.
        """
        self._count()
        if not observers:
            return
        counts = [rows.n_rows for rows in self._groups]
        now = list(torch.split(self._now, counts))
        for index, (segments, observer) in enumerate(zip(self._segments, observers, strict=True)):
            attended = None if observer is None else observer.mean()
            if segments is not None and attended is not None:
                now[index] = _shares(attended, segments, self._now.shape[1])
        self._now = torch.cat(now)

    def shares(self) -> list[tuple[float, ...]]:
        """Return the shares of every token, that included which was chosen last."""
        self._count()
        if not self._shares:
            return []
        found: list[list[float]] = torch.stack(self._shares).tolist()
        return [tuple(row) for row in found]

    def _count(self) -> None:
        if self._weights is not None:
            self._shares.append((self._weights[:, None] * self._now).sum(dim=0))
            self._weights = None


def can_be_traced(groups: Sequence[Rows]) -> bool:
    """Return whether it can be told which passages these rows' tokens come from.

    Not where a model is split over processes, each of which sees its own heads only, nor where a layer forgets keys.
    """
    return all(
        rows.loaded.spec.ranks.count == 1 and (rows.loaded.keeps_all_keys or _speaks_of_one(rows)) for rows in groups
    )


def _speaks_of_one(rows: Rows) -> bool:
    """Return whether no row holds two passages: then no attention need be looked at."""
    return all(len(held) < 2 for held in rows.placed)


def _segments(rows: Rows, n_passages: int) -> Tensor | None:
    """Return the passage of each token in the cache, (R, length), N for those of none; None if no row holds two."""
    if _speaks_of_one(rows):
        return None
    segments = torch.full((rows.n_rows, rows.length), n_passages, dtype=torch.long)
    for row, held in enumerate(rows.placed):
        for passage, start, stop in held:
            segments[row, start:stop] = passage
    return segments.to(rows.positions.device)


def _shares(attended: Tensor, segments: Tensor, n_passages: int) -> Tensor:
    """Return (R, N) shares from the attention to all tokens, (R, Tk); generated ones come last and do not count."""
    mass = attended.new_zeros((attended.shape[0], n_passages + 1))
    mass.scatter_add_(1, segments, attended[:, : segments.shape[1]])
    total = mass[:, :-1].sum(dim=1, keepdim=True)
    return mass[:, :-1] / total.where(total > 0, 1.0)
