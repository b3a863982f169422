"""Probe of the geometry of hidden states: position, context and what is left, their rank, smoothness and angles."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column
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
from rag_posfix.lab.probing.subject import Subject, check_length, states_of
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {
    "position": "share of position",
    "context": "share of context",
    "residual": "share of residual",
    "rank": "rank",
    "low_frequencies": "pos in low frequencies",
    "cosine": "|cos| of pos and ctx",
}
FREQUENCIES = 10
ENERGY = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Decomposition:
    """h_ct = mu + pos_t + ctx_c + resid_ct, by layer.

    Shapes:
        position: (L, T, width). context: (L, C, width). shares: (3, L), the shares of position, context
        and residual in the variance.
    """

    position: Tensor
    context: Tensor
    shares: Tensor


def decompose(sums: StateSums) -> Decomposition:
    """Return the parts of hidden states.

    Formula: mu = mean over c and t; pos_t = mean over c - mu; ctx_c = mean over t - mu; resid is what is left. The
        parts are orthogonal over all c and t, so that their variances add up.
    """
    by_context = sums.contexts.transpose(0, 1)  # (L, C, width)
    by_position = sums.total / sums.count  # (L, T, width)
    centre = by_context.mean(dim=1, keepdim=True)
    position, context = by_position - centre, by_context - centre
    variance = sums.squares / (position.shape[1] * context.shape[1]) - centre.square().sum(dim=(1, 2))
    shares = [
        component.square().sum(dim=-1).mean(dim=-1) / variance.clamp(min=1e-12) for component in (position, context)
    ]
    return Decomposition(position, context, torch.stack([*shares, 1 - shares[0] - shares[1]]))


def by_layer(sums: StateSums) -> Tensor:
    """Return the ``MEASURES`` of each layer but the first, whose states are embeddings, flattened."""
    parts = decompose(sums)
    layers = range(1, parts.position.shape[0])
    other = [
        [
            rank_of(parts.position[n]),
            low_frequency_share(parts.position[n]),
            mean_cosine(parts.position[n], parts.context[n]),
        ]
        for n in layers
    ]
    return torch.cat((parts.shares[:, 1:].T, torch.tensor(other, dtype=torch.float64).view(-1, 3)), dim=1).flatten()


def rank_of(vectors: Tensor, energy: float = ENERGY) -> int:
    """Return how many singular values hold this share of the squared norm.

    Shapes:
        vectors: (N, width).
    """
    gram = vectors @ vectors.T if vectors.shape[0] <= vectors.shape[1] else vectors.T @ vectors
    squares = torch.linalg.eigvalsh(gram.double()).clamp(min=0).flip(0)
    return 1 + int((squares.cumsum(0) < energy * squares.sum()).sum())


def low_frequency_share(vectors: Tensor, frequencies: int = FREQUENCIES) -> float:
    """Return the share of the squared norm in the lowest frequencies of the cosine transform (DCT-II) over positions.

    Shapes:
        vectors: (T, width).
    """
    count = vectors.shape[0]
    indices = torch.arange(count, dtype=torch.float64)
    basis = (math.pi / count * (indices + 0.5)[None] * indices[:, None]).cos()  # (frequency, T)
    basis = basis / basis.norm(dim=-1, keepdim=True)
    energy = (basis @ vectors.double()).square().sum(dim=-1)
    return float(energy[:frequencies].sum() / energy.sum().clamp(min=1e-300))


def chance_of(count: int, width: int) -> tuple[int, float]:
    """Return the rank of random vectors of so many positions, and their share in the lowest frequencies."""
    return rank_of(torch.randn(count, width, generator=torch.Generator().manual_seed(0))), FREQUENCIES / count


def mean_cosine(left: Tensor, right: Tensor) -> float:
    """Return the mean absolute cosine of every vector of one set with every vector of the other.

    Shapes:
        left: (N, width). right: (M, width).
    """
    units = [vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12) for vectors in (left, right)]
    return float((units[0] @ units[1].T).abs().mean())


@PROBES.register("hidden-geometry")
@dataclass(frozen=True)
class HiddenGeometry(MeasuredProbe):
    """Split hidden states into mean, position, context and residual.

    Source: Song and Zhong (2023), Uncovering Hidden Geometry in Transformers via Disentangling Position and Context,
        https://arxiv.org/abs/2310.04861
    Formula: h_ct = mu + pos_t + ctx_c + resid_ct (``decompose``). Rank: singular values with 95 % of the squared norm
        of pos. Smoothness: share of pos in the ten lowest frequencies over positions. Orthogonality: mean |cos| of
        pos_t and ctx_c; random vectors of d channels have about sqrt(2 / (pi d)). Intervals: jackknife over eight
        groups of strings.
    Differs from the paper: a context is a string of random tokens from a small vocabulary of its own in place of a
        text; rank by energy in place of ScreeNOT; the first positions are left out, as the norm of
        attention sinks would hide all others.

    Args:
        contexts: Number of strings.
        tokens: Tokens per string.
        skip: First positions that are left out.
        words: Different tokens that a string is drawn from.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "hidden-geometry"
    caption: ClassVar[str] = (
        "Shares, rank, smoothness and angles of the position part of hidden states by layer, and its main directions; "
        "do not conclude that texts have these shares, as the tokens are random."
    )
    small: ClassVar[Mapping[str, int]] = {"tokens": 128}

    contexts: Annotated[int, Integer(2)] = 32
    tokens: Annotated[int, Integer(16)] = 256
    skip: Annotated[int, Integer(0)] = 4
    words: Annotated[int, Integer(1)] = 16
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the strings; see ``Probe.run``."""
        if subject.n_layers < 2:  # what enters the first are embeddings, which by_layer leaves out
            raise UnsupportedModelError(
                f"{subject.facts()['model']} has one layer; hidden-geometry measures what enters the second and later "
                "ones; choose a model with two layers or more"
            )
        check_length(subject, self.tokens, self.skip + 8)
        with progress("reading random text") as report:
            states = states_of(subject, self.contexts, self.tokens, self.seed, report, self.words)
            parts = sums_by_group(states, self.skip)
        with progress("leaving out groups of strings"):
            values = by_layer(StateSums.merged(parts)).tolist()
            intervals = intervals_by_group(parts, by_layer)
        width = len(MEASURES)
        layers = [
            {
                "layer": 1 + start // width,
                **dict(zip(MEASURES, values[start : start + width], strict=True)),
                "ci95": dict(zip(MEASURES, intervals[start : start + width], strict=True)),
            }
            for start in range(0, len(values), width)
        ]
        decomposition = decompose(StateSums.merged(parts))
        middle = decomposition.position[subject.n_layers // 2]
        left, values, _ = torch.linalg.svd(middle, full_matrices=False)
        spiral = (left[:, :3] * values[:3]).T
        return Found(
            {
                "layers": layers,
                "contexts": self.contexts,
                "width": subject.width,
                "cosine_of_random_vectors": math.sqrt(2 / (math.pi * subject.width)),
                "spiral_layer": subject.n_layers // 2,
                "spiral": spiral.tolist(),
            }
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return shares, rank, smoothness and angles by layer, and two main directions of pos over positions."""
        summary = head["summary"]
        figure, (top, middle, bottom) = new_column(3, 3.1)
        layers = [layer["layer"] for layer in summary["layers"]]
        for number, (key, label) in enumerate(MEASURES.items()):
            axes = middle if key == "rank" else top
            if key == "residual":
                continue
            axes.plot(layers, [layer[key] for layer in summary["layers"]], color=OTHER_COLORS[number], label=label)
            low, high = zip(*(layer["ci95"][key] for layer in summary["layers"]), strict=True)
            axes.fill_between(layers, low, high, color=OTHER_COLORS[number], alpha=0.25, linewidth=0)
        top.axhline(summary["cosine_of_random_vectors"], color="#999999", linestyle=":", label="|cos| at random")
        top.set_ylim(0, 1.02)
        n, places = summary["contexts"], head["settings"]["tokens"] - head["settings"]["skip"]
        width = 2 / (math.pi * summary["cosine_of_random_vectors"] ** 2)  # older records do not tell it
        rank, smooth = chance_of(places, round(width))
        top.axhline(smooth, color=OTHER_COLORS[4], linestyle="--", label="low frequencies, random")
        middle.axhline(rank, color=OTHER_COLORS[3], linestyle=":")
        finish_axes(top, f"{n} strings, band: 95 % interval", "layer", "share or |cos|", columns=2)
        title = f"rank of pos (95 % of its energy), {n} strings\ndotted: random vectors"
        finish_axes(middle, title, "layer", "directions", legend=False)
        middle.set_ylim(bottom=0)
        spiral = summary["spiral"]
        first = head["settings"]["skip"]
        positions = range(first, first + len(spiral[0]))
        points = bottom.scatter(spiral[0], spiral[min(1, len(spiral) - 1)], c=list(positions), s=10, cmap="viridis",
                                edgecolors="#999999", linewidths=0.8)  # fmt: skip
        figure.colorbar(points, ax=bottom, label="position")
        title = f"main directions of pos before layer {summary['spiral_layer']}, {n} strings"
        finish_axes(bottom, title, "first direction", "second direction", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per layer."""
        rows = [
            (
                str(layer["layer"]),
                *(
                    shown({"value": layer[key], "ci95": layer["ci95"][key]}, ".0f" if key == "rank" else ".2f")
                    for key in MEASURES
                ),
            )
            for layer in head["summary"]["layers"]
        ]
        return [(f"layer, n = {head['summary']['contexts']}", *MEASURES.values()), *rows]
