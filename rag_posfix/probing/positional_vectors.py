"""Probe of positional vectors: what is alike in the hidden states of a position, whatever the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe, draw_map
from rag_posfix.probing.prompts import check_length, states_of
from rag_posfix.probing.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACES = 48
FORMED = 0.1


def positional_vectors(states: Iterable[Tensor], skip: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positional vectors, and their share of the variance of hidden states by layer.

    Formula: p_lt = mean over strings of h_lt; c_lt = h_lt - p_lt. With m_l the mean of p_lt over t, the share is
        sum_t |p_lt - m_l|^2 / sum_t mean |h_lt - m_l|^2. The first ``skip`` positions are left out.

    Shapes:
        states: (L, T, width) each, one string or more. returns: (L, T - skip, width) less m_l, and (L,), float64.
    """
    total, squares, count = torch.zeros(()), torch.zeros(()), 0
    for state in states:
        tail = state[:, skip:].double()
        total, squares, count = total + tail, squares + tail.square().sum(dim=(1, 2)), count + 1
    means = total / count  # (L, T - skip, width)
    centre = means.mean(dim=1, keepdim=True)
    spread = squares / count - means.shape[1] * centre[:, 0].square().sum(dim=-1)
    centred = means - centre
    return centred, centred.square().sum(dim=(1, 2)) / spread.clamp(min=1e-12)


def similarities(vectors: Tensor) -> Tensor:
    """Return the cosine similarity of the vectors of every two positions.

    Shapes:
        vectors: (L, T, width). returns: (L, T, T).
    """
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    alike: Tensor = unit @ unit.transpose(-1, -2)
    return alike


@PROBES.register("positional-vectors")
@dataclass(frozen=True)
class PositionalVectors(MeasuredProbe):
    """Split hidden states into a vector of the position and one of the content, and compare those of positions.

    Source: Dong et al. (2024), Exploring Context Window of Large Language Models via Decomposed Positional Vectors,
        section 3, https://arxiv.org/abs/2405.18009
    Formula: h_lt = p_lt + c_lt s, p_lt the mean over texts of the state that enters layer l at position t, s the text.
        Similarity of positions: cosine of p_lt less its mean over positions. Share: what of the variance of h is that
        of p.
    Differs from the paper: random tokens in place of texts; the first positions are left out, as the norm of
        attention sinks would hide all others.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        skip: First positions that are left out.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "positional-vectors"
    source: ClassVar[str] = (
        "Dong et al. (2024), Exploring Context Window of Large Language Models via Decomposed Positional Vectors, "
        "https://arxiv.org/abs/2405.18009"
    )
    deviations: ClassVar[tuple[str, ...]] = ("Random tokens in place of texts.", "The first positions are left out.")

    strings: Annotated[int, Integer(2)] = 64
    tokens: Annotated[int, Integer(16)] = 256
    skip: Annotated[int, Integer(0)] = 4
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read random text; see ``Probe.run``."""
        check_length(subject, self.tokens, self.skip + 8)
        with progress("reading random text") as report:
            states = states_of(subject, self.strings, self.tokens, self.seed, report)
            vectors, shares = positional_vectors(states, self.skip)
        alike = similarities(vectors)
        step = max(1, alike.shape[1] // PLACES)
        near = [float(matrix.diagonal(1).mean()) for matrix in alike]
        far = [float(matrix.diagonal(matrix.shape[0] // 2).mean()) for matrix in alike]
        formed = next((layer for layer, share in enumerate(shares.tolist()) if share >= FORMED), None)
        layers = sorted({min(1, subject.n_layers - 1), subject.n_layers // 2, subject.n_layers - 1})
        return Found(
            {
                "share_of_variance": shares.tolist(),
                "similarity_to_next": near,
                "similarity_at_half_the_length": far,
                "first_layer_above_a_tenth": formed,
                "places": [self.skip + position for position in range(0, alike.shape[1], step)],
                "similarity": {str(layer): alike[layer, ::step, ::step].tolist() for layer in layers},
            }
        )

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the share by layer, and the similarity of positions in three layers."""
        summary = head["summary"]
        maps = summary["similarity"]
        figure, (first, *map_axes) = new_row(1 + len(maps), (3.6 * (1 + len(maps)), 3.4))
        first.plot(summary["share_of_variance"], color=OTHER_COLORS[2], label="share of variance")
        first.plot(summary["similarity_to_next"], color=OTHER_COLORS[1], label="similarity, next position")
        first.plot(summary["similarity_at_half_the_length"], color=OTHER_COLORS[3], label="half the length away")
        first.set_xlabel("layer")
        first.set_title(str(head["model"]), fontsize=10, loc="left")
        first.legend(frameon=False, fontsize=7)
        low, high = summary["places"][0], summary["places"][-1]
        for axes, (layer, values) in zip(map_axes, maps.items(), strict=True):
            draw_map(figure, axes, values, cmap="RdBu_r", vmin=-1, vmax=1, extent=(low, high, low, high))
            axes.set_xlabel("position")
            axes.set_title(f"similarity before layer {layer}", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per layer."""
        summary = head["summary"]
        columns = ("share_of_variance", "similarity_to_next", "similarity_at_half_the_length")
        rows = [
            (str(layer), *(f"{summary[key][layer]:.3f}" for key in columns))
            for layer in range(len(summary["share_of_variance"]))
        ]
        return [("layer", "share of variance", "similarity to the next", "half the length away"), *rows]
