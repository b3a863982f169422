"""Probe of hidden channels that vary with the position for any text; it writes a profile for ``hidden_scaling``.

Depends on loaded models and hidden states only; of the methods, on the one that reads the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.record import environment
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.probing.prompts import check_length, random_strings
from rag_posfix.probing.subject import Subject, Watch

WINDOW = 10
FEWEST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PositionalChannel:
    """A hidden channel whose mean over random text rises or falls with the position.

    Attributes:
        channel: Its index, from 0.
        layers: The layers in which it rises, or those in which it falls, whichever are more.
        roughness: Deviation of its curve from a smooth one, in the smoothest of these layers; 0 is a straight line.
    """

    channel: int
    layers: tuple[int, ...]
    roughness: float


def find_channels(subject: Subject, means: Tensor, top: int) -> list[PositionalChannel]:
    """Return the channels of ``rank_channels``; an error if there are none."""
    channels = rank_channels(means, top)
    if not channels:
        raise UnsupportedModelError(
            f"no hidden channel of {subject.facts()['model']} follows the position in more than a quarter of its "
            "layers; hidden_scaling has nothing to scale there; try more --strings or --tokens"
        )
    return channels


def channel_profile(
    subject: Subject,
    channels: Sequence[PositionalChannel],
    channel: int,
    factor: float | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the profile that ``hidden_scaling`` reads; without a factor it is a finding that no method reads."""
    layers = default_layers(subject.n_layers)
    facts = subject.facts()
    return {
        "channel": channel,
        "factor": factor,
        "layers": [layers.start, layers.stop - 1],
        "candidates": [
            {"channel": candidate.channel, "layers": list(candidate.layers), "roughness": candidate.roughness}
            for candidate in channels
        ],
        "model": facts["model"],
        "model_fingerprint": facts["model_fingerprint"],
        "settings": dict(settings),
        "environment": environment(),
    }


def mean_hidden_states(
    subject: Subject, n_strings: int, n_tokens: int, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Return hidden states in each layer at each position, averaged over strings of random tokens.

    Cost: one forward pass per string; memory for 2 x layers x tokens x hidden channels in float32.

    Shapes:
        returns: the residual stream that enters each layer, and what its attention reads, the same after the layer's
            first norm; (L, T, hidden) float32 each, on the CPU.
    """
    if n_strings < 1:
        raise ConfigError(f"strings={n_strings} cannot be probed; give at least 1")
    check_length(subject, n_tokens, FEWEST_TOKENS)
    totals = torch.zeros(2, subject.n_layers, n_tokens, subject.width)

    def add(total: Tensor, layer: int, states: Tensor) -> None:
        total[layer] += states[0].float().cpu()

    for ids in random_strings(subject, n_strings, n_tokens, seed, progress):
        subject.read(ids, Watch(states=partial(add, totals[0]), inputs=partial(add, totals[1])))
    residual, after_norm = totals / n_strings
    return residual, after_norm


def rank_channels(means: Tensor, top: int | None = 10, *, one_direction: bool = True) -> list[PositionalChannel]:
    """Return the channels that follow the position in more than a quarter of the layers, the smoothest first.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536
    Formula: per layer and channel, a cubic is fitted to the curve over the positions, the first three tenths left out;
        the curve rises or falls where the cubic's slope keeps its sign. A channel counts if it rises in more than a
        quarter of the layers, or falls in as many. Roughness is the sum of squared second differences of the curve,
        smoothed over ten positions; the least over these layers counts.
    Differs from the paper: smoothing is a moving average instead of a Savitzky-Golay filter; each curve is first
        divided by its standard deviation, so that a channel is not smooth by being small; the first layer is left
        out, as embeddings enter it, and so is the state after the last layer. ``positional_dimensions`` chooses among
        them by a task.

    Args:
        top: Most channels; None keeps all.
        one_direction: As the authors do; False counts rising and falling layers together.

    Shapes:
        means: (L, T, hidden), as ``mean_hidden_states`` returns them.
    """
    n_layers, n_tokens, _ = means.shape
    if n_layers < 2:
        return []
    fits = [_direction(layer[3 * n_tokens // 10 :]) for layer in means[1:]]
    direction, roughness = (torch.stack(values) for values in zip(*fits, strict=True))  # (L - 1, hidden)
    rising, falling = direction > 0, direction < 0
    follows = torch.where(rising.sum(dim=0) >= falling.sum(dim=0), rising, falling)
    follows = follows if one_direction else rising | falling
    least = roughness.masked_fill(~follows, torch.inf).amin(dim=0)
    channels = (follows.sum(dim=0) > n_layers / 4).nonzero()[:, 0].tolist()
    channels.sort(key=lambda c: float(least[c]))  # stable: channels alike stay in their own order
    return [
        PositionalChannel(c, tuple(1 + int(i) for i in follows[:, c].nonzero()[:, 0]), float(least[c]))
        for c in channels[:top]
    ]


def _direction(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 for channels whose curve rises, -1 where it falls, else 0, (hidden,), and the roughness, (hidden,).

    Shapes:
        curves: (T, hidden).
    """
    curves = curves.double()
    positions = torch.linspace(-1, 1, curves.shape[0], dtype=torch.float64)
    powers = torch.stack([positions**power for power in range(4)], dim=1)  # (T, 4)
    cubic = torch.linalg.lstsq(powers, curves).solution  # (4, hidden)
    slope = cubic[1] + 2 * positions[:, None] * cubic[2] + 3 * positions[:, None] ** 2 * cubic[3]  # (T, hidden)
    spread = curves.std(dim=0)
    direction = ((slope > 0).all(dim=0).int() - (slope < 0).all(dim=0).int()) * (spread > 0)
    even = curves / spread.where(spread > 0, 1.0)
    smoothed = even.unfold(0, WINDOW, 1).mean(dim=-1)  # (T - WINDOW + 1, hidden)
    return direction, smoothed.diff(n=2, dim=0).square().sum(dim=0)
