"""Probe of positional vectors: what is alike in the hidden states of a position, whatever the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, draw_map, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.probing.base import (
    PROBES,
    Found,
    MeasuredProbe,
    StateSums,
    intervals_by_group,
    shown,
    sums_by_group,
)
from rag_posfix.lab.probing.hidden_geometry import decompose
from rag_posfix.lab.probing.subject import Subject, check_length, states_of
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {
    "share_of_variance": "share, less chance",
    "similarity_to_next": "cosine, next position",
    "similarity_at_half_the_length": "cosine, half the length away",
}
PLACES = 48
FORMED = 0.1


def similarities(vectors: Tensor) -> Tensor:
    """Return the cosine similarity of the vectors of every two positions.

    Shapes:
        vectors: (L, T, width). returns: (L, T, T).
    """
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    alike: Tensor = unit @ unit.transpose(-1, -2)
    return alike


def without_chance(share: float, n: int) -> float:
    """Return a position's share of variance less what the mean of n strings has by chance, (1 - share) / (n - 1)."""
    return share - (1 - share) / (n - 1)


def by_layer(sums: StateSums) -> Tensor:
    """Return share, similarity to the next position and similarity half the length away of each layer, (3 L,)."""
    parts = decompose(sums)
    alike = similarities(parts.position)
    near, far = (alike.diagonal(offset, dim1=1, dim2=2).mean(dim=-1) for offset in (1, alike.shape[1] // 2))
    return torch.cat((parts.shares[0], near, far))


@PROBES.register("positional-vectors")
@dataclass(frozen=True)
class PositionalVectors(MeasuredProbe):
    """Split hidden states into position and content vectors.

    Source: Dong et al. (2024), Exploring Context Window of Large Language Models via Decomposed Positional Vectors,
        section 3, https://arxiv.org/abs/2405.18009
    Formula: h_lt = p_lt + c_lt s, p_lt the mean over texts of the state that enters layer l at position t, s the text.
        Similarity of positions: cosine of p_lt less its mean over positions. Share: what of the variance of h is that
        of p; figure and table have it without the share of chance, (1 - share) / (n - 1) of n strings. Intervals:
        jackknife over eight groups of strings.
    Differs from the paper: random tokens in place of texts; the first positions are left out, as the norm of
        attention sinks would hide all others.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        skip: First positions that are left out.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "positional-vectors"
    caption: ClassVar[str] = (
        "The share of hidden states that belongs to the position by layer, and how alike the positions are; do not "
        "conclude that texts have these shares, as the tokens are random."
    )
    small: ClassVar[Mapping[str, int]] = {"tokens": 128}

    strings: Annotated[int, Integer(2)] = 32
    tokens: Annotated[int, Integer(16)] = 256
    skip: Annotated[int, Integer(0)] = 4
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read random text; see ``Probe.run``."""
        check_length(subject, self.tokens, self.skip + 8)
        with progress("reading random text") as report:
            states = states_of(subject, self.strings, self.tokens, self.seed, report)
            parts = sums_by_group(states, self.skip)
        alike = similarities(decompose(StateSums.merged(parts)).position)
        step = max(1, alike.shape[1] // PLACES)
        shares, near, far = by_layer(StateSums.merged(parts)).view(3, -1)
        intervals = iter(intervals_by_group(parts, by_layer))
        formed = next((layer for layer, share in enumerate(shares.tolist()) if share >= FORMED), None)
        layers = sorted({min(1, subject.n_layers - 1), subject.n_layers // 2, subject.n_layers - 1})
        return Found(
            {
                **{name: values.tolist() for name, values in zip(MEASURES, (shares, near, far), strict=True)},
                "ci95": {name: list(islice(intervals, subject.n_layers)) for name in MEASURES},
                "strings": self.strings,
                "first_layer_above_a_tenth": formed,
                "places": [self.skip + position for position in range(0, alike.shape[1], step)],
                "similarity": {str(layer): alike[layer, ::step, ::step].tolist() for layer in layers},
            }
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the share by layer, and the similarity of positions in three layers."""
        summary = head["summary"]
        maps = summary["similarity"]
        figure, (first, *map_axes) = new_column(1 + len(maps))
        layers = range(len(summary["share_of_variance"]))
        for number, (name, text) in enumerate(MEASURES.items()):
            measured = [estimate_of_layer(summary, name, layer) for layer in layers]
            first.plot(layers, [entry["value"] for entry in measured], color=OTHER_COLORS[number], label=text)
            low, high = zip(*(entry["ci95"] for entry in measured), strict=True)
            first.fill_between(layers, low, high, color=OTHER_COLORS[number], alpha=0.25, linewidth=0)
        title = f"{summary['strings']} strings, band: 95 % interval"
        finish_axes(first, title, "layer", "share or cosine")
        ends = (summary["places"][0], summary["places"][-1]) * 2
        for axes, (layer, values) in zip(map_axes, maps.items(), strict=True):
            draw_map(figure, axes, values, cmap="RdBu_r", vmin=-1, vmax=1, extent=ends)
            title = f"cosine of positions before layer {layer}, {summary['strings']} strings"
            finish_axes(axes, title, "position", "position", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per layer."""
        summary = head["summary"]
        rows = [
            (
                str(layer),
                *(shown(estimate_of_layer(summary, name, layer)) for name in MEASURES),
            )
            for layer in range(len(summary["share_of_variance"]))
        ]
        return [(f"layer, n = {summary['strings']}", *MEASURES.values()), *rows]


def estimate_of_layer(summary: Mapping[str, Any], name: str, layer: int) -> dict[str, Any]:
    """Return a measure of a layer with its interval, the share without that of chance."""
    value, ends = summary[name][layer], summary["ci95"][name][layer]
    if name == "share_of_variance":
        value, *ends = (without_chance(share, summary["strings"]) for share in (value, *ends))
    return {"value": value, "ci95": ends}
