"""Probe of the geometry of hidden states: position, context and what is left, their rank, smoothness and angles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.probing.prompts import check_length, states_of
from rag_posfix.probing.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def decompose(states: Iterable[Tensor], skip: int = 0) -> Decomposition:
    """Return the parts of hidden states; the first ``skip`` positions are left out.

    Formula: mu = mean over c and t; pos_t = mean over c - mu; ctx_c = mean over t - mu; resid is what is left. The
        parts are orthogonal over all c and t, so that their variances add up.

    Shapes:
        states: (L, T, width) each, one per context.
    """
    total, squares = torch.zeros(()), torch.zeros(())
    contexts = []
    for state in states:
        tail = state[:, skip:].double()
        total, squares = total + tail, squares + tail.square().sum(dim=(1, 2))
        contexts.append(tail.mean(dim=1))
    by_context = torch.stack(contexts, dim=1)  # (L, C, width)
    by_position = total / by_context.shape[1]  # (L, T, width)
    centre = by_context.mean(dim=1, keepdim=True)
    position, context = by_position - centre, by_context - centre
    variance = squares / (position.shape[1] * context.shape[1]) - centre.square().sum(dim=(1, 2))
    shares = [
        component.square().sum(dim=-1).mean(dim=-1) / variance.clamp(min=1e-12) for component in (position, context)
    ]
    return Decomposition(position, context, torch.stack([*shares, 1 - shares[0] - shares[1]]))


def rank_of(vectors: Tensor, energy: float = ENERGY) -> int:
    """Return how many singular values hold this share of the squared norm.

    Shapes:
        vectors: (N, width).
    """
    squares = torch.linalg.svdvals(vectors).square()
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
    """Split hidden states into mean, position, context and residual, and measure rank, smoothness and angles.

    Source: Song and Zhong (2023), Uncovering Hidden Geometry in Transformers via Disentangling Position and Context,
        https://arxiv.org/abs/2310.04861
    Formula: h_ct = mu + pos_t + ctx_c + resid_ct (``decompose``). Rank: singular values with 95 % of the squared norm
        of pos. Smoothness: share of pos in the ten lowest frequencies over positions. Orthogonality: mean |cos| of
        pos_t and ctx_c; random vectors of d channels have about sqrt(2 / (pi d)).
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
    source: ClassVar[str] = (
        "Song and Zhong (2023), Uncovering Hidden Geometry in Transformers via Disentangling Position and Context, "
        "https://arxiv.org/abs/2310.04861"
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Contexts are strings of random tokens, each from a small vocabulary of its own.",
        "The rank counts singular values with 95 % of the squared norm.",
        "The first positions are left out.",
    )

    contexts: Annotated[int, Integer(2)] = 64
    tokens: Annotated[int, Integer(16)] = 256
    skip: Annotated[int, Integer(0)] = 4
    words: Annotated[int, Integer(1)] = 16
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the strings; see ``Probe.run``."""
        check_length(subject, self.tokens, self.skip + 8)
        with progress("reading random text") as report:
            states = states_of(subject, self.contexts, self.tokens, self.seed, report, self.words)
            decomposition = decompose(states, self.skip)
        layers = []
        for layer in range(1, subject.n_layers):  # what enters layer 0 are embeddings
            position, context = decomposition.position[layer], decomposition.context[layer]
            layers.append(
                {
                    "layer": layer,
                    **dict(
                        zip(("position", "context", "residual"), decomposition.shares[:, layer].tolist(), strict=True)
                    ),
                    "rank": rank_of(position),
                    "low_frequencies": low_frequency_share(position),
                    "cosine": mean_cosine(position, context),
                }
            )
        middle = decomposition.position[subject.n_layers // 2]
        left, values, _ = torch.linalg.svd(middle, full_matrices=False)
        spiral = (left[:, :3] * values[:3]).T
        return Found(
            {
                "layers": layers,
                "cosine_of_random_vectors": math.sqrt(2 / (math.pi * subject.width)),
                "spiral_layer": subject.n_layers // 2,
                "spiral": spiral.tolist(),
            }
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return shares, rank, smoothness and angles by layer, and two main directions of pos over positions."""
        summary = head["summary"]
        figure, (left, middle, right) = new_row(3, (12.0, 3.6))
        layers = [layer["layer"] for layer in summary["layers"]]
        for number, key in enumerate(("position", "context", "low_frequencies", "cosine")):
            values = [layer[key] for layer in summary["layers"]]
            text = {"low_frequencies": "pos in low frequencies", "cosine": "|cos| of pos and ctx"}
            label = text.get(key, f"share of {key}")
            left.plot(layers, values, color=OTHER_COLORS[number], label=label)
        left.axhline(summary["cosine_of_random_vectors"], color="#999999", linestyle=":", label="|cos| at random")
        left.set_ylim(0, 1.02)
        left.legend(frameon=False, fontsize=7)
        left.set_title(str(head["model"]), fontsize=10, loc="left")
        middle.plot(layers, [layer["rank"] for layer in summary["layers"]], color=OTHER_COLORS[1])
        middle.set_title("rank of pos (95 % of its energy)", fontsize=10, loc="left")
        middle.set_ylim(bottom=0)
        for axes in (left, middle):
            axes.set_xlabel("layer")
        spiral = summary["spiral"]
        first = head["settings"]["skip"]
        positions = range(first, first + len(spiral[0]))
        points = right.scatter(spiral[0], spiral[min(1, len(spiral) - 1)], c=list(positions), s=6, cmap="viridis")
        figure.colorbar(points, ax=right, label="position")
        right.set_title(f"main directions of pos, layer {summary['spiral_layer']}", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per layer."""
        keys = ("position", "context", "residual", "low_frequencies", "cosine")
        rows = [
            (str(layer["layer"]), *(f"{layer[key]:.3f}" for key in keys), str(layer["rank"]))
            for layer in head["summary"]["layers"]
        ]
        return [("layer", "position", "context", "residual", "low frequencies", "|cos|", "rank"), *rows]
