"""Probe of hidden channels that vary with the position for any text; it writes a profile for ``hidden_scaling``.

Depends on loaded models and hidden states only; of the methods, on the one that reads the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, write_record
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.probing.prompts import check_length, random_strings
from rag_posfix.probing.subject import LanguageModel, Subject, Watch
from rag_posfix.settings import Settings

WINDOW = 10
FEWEST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PositionalChannel:
    """A hidden channel whose mean over random text rises or falls with the position.

    Attributes:
        channel: Its index, from 0.
        layers: The layers in which it rises or falls.
        roughness: Deviation of its curve from a smooth one, in the smoothest of these layers; 0 is a straight line.
    """

    channel: int
    layers: tuple[int, ...]
    roughness: float


@dataclass(frozen=True, slots=True, eq=False)
class PositionalChannelsRecord(ExperimentRecord):
    """The result of ``probe_positional_channels``: the head is the profile that ``hidden_scaling`` reads."""

    def to_json(self) -> dict[str, Any]:
        """Return the path of the profile, its channel, factor and layers, and the candidates."""
        files = {name: str(path) for name, path in self.files.items()}
        return {**files, **{key: self.head[key] for key in ("channel", "factor", "layers", "candidates")}}

    def write_profile(self, out: Path | None) -> PositionalChannelsRecord:
        """Return this record with its file, written to a folder; None writes nothing."""
        if out is None:
            return self
        return replace(self, files={"profile": write_record(out, "positional-dimensions", self.head)})


def probe_positional_channels(
    *,
    strings: int = 100,
    tokens: int = 1000,
    top: int = 10,
    factor: float = 0.0,
    seed: int = 0,
    engine: Engine | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> PositionalChannelsRecord:
    """Find the hidden channel that follows the position most smoothly (``rank_channels``).

    Args:
        factor: The factor that the profile asks ``hidden_scaling`` for.
    """
    create("hidden_scaling", {"factor": factor})  # an error in the factor is told before the work
    if engine is None:
        with progress("loading the model"):
            from rag_posfix.pipeline.build import build_engine

            engine = build_engine(settings or Settings())
    model = LanguageModel(engine)
    with progress("reading random text") as report:
        means = mean_hidden_states(model, strings, tokens, seed, report)
    channels = find_channels(model, means, top)
    settings_used = {"strings": strings, "tokens": tokens, "seed": seed}
    record = PositionalChannelsRecord(channel_profile(model, channels, channels[0].channel, factor, settings_used))
    return record.write_profile(out)


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
    factor: float,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the profile that ``hidden_scaling`` reads."""
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
    subject: Subject,
    n_strings: int,
    n_tokens: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return what attention reads in each layer at each position, averaged over strings of random tokens.

    Cost: one forward pass per string; memory for layers x tokens x hidden channels in float32.

    Shapes:
        returns: (L, T, hidden) float32, on the CPU.
    """
    if n_strings < 1:
        raise ConfigError(f"strings={n_strings} cannot be probed; give at least 1")
    check_length(subject, n_tokens, FEWEST_TOKENS)
    total = torch.zeros(subject.n_layers, n_tokens, subject.width)

    def add(layer: int, states: Tensor) -> None:
        total[layer] += states[0].float().cpu()

    for ids in random_strings(subject, n_strings, n_tokens, seed, progress):
        subject.read(ids, Watch(inputs=add))
    return total / n_strings


def rank_channels(means: Tensor, top: int = 10) -> list[PositionalChannel]:
    """Return the channels that follow the position in more than a quarter of the layers, the smoothest first.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536
    Formula: per layer and channel, a cubic is fitted to the curve over the positions, the first three tenths left out;
        the curve is monotone where the cubic's slope keeps its sign. Roughness is the sum of squared second
        differences of the curve, smoothed over ten positions; the least over the monotone layers counts.
    Differs from the paper: smoothing is a moving average instead of a Savitzky-Golay filter; each curve is first
        divided by its standard deviation, so that a channel is not smooth by being small; the first layer is left
        out, as its attention reads embeddings. ``positional_dimensions`` chooses among them by a task.

    Shapes:
        means: (L, T, hidden), as ``mean_hidden_states`` returns them.
    """
    n_layers, n_tokens, hidden_size = means.shape
    fits: list[tuple[Tensor, Tensor]] = [_follows_position(layer[3 * n_tokens // 10 :]) for layer in means[1:]]
    if not fits:
        return []
    monotone = torch.stack([is_monotone for is_monotone, _ in fits])  # (L - 1, hidden)
    roughness = torch.stack([values for _, values in fits]).masked_fill(~monotone, torch.inf)
    least = roughness.amin(dim=0)
    channels = [c for c in range(hidden_size) if int(monotone[:, c].sum()) > n_layers / 4]
    channels.sort(key=lambda c: float(least[c]))  # stable: channels alike stay in their own order
    return [
        PositionalChannel(c, tuple(1 + int(i) for i in monotone[:, c].nonzero()[:, 0]), float(least[c]))
        for c in channels[:top]
    ]


def _follows_position(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each channel's curve is monotone, (hidden,) bool, and its roughness, (hidden,).

    Shapes:
        curves: (T, hidden).
    """
    curves = curves.double()
    positions = torch.linspace(-1, 1, curves.shape[0], dtype=torch.float64)
    powers = torch.stack([positions**power for power in range(4)], dim=1)  # (T, 4)
    cubic = torch.linalg.lstsq(powers, curves).solution  # (4, hidden)
    slope = cubic[1] + 2 * positions[:, None] * cubic[2] + 3 * positions[:, None] ** 2 * cubic[3]  # (T, hidden)
    monotone = (slope > 0).all(dim=0) | (slope < 0).all(dim=0)
    spread = curves.std(dim=0)
    even = curves / spread.where(spread > 0, 1.0)
    smoothed = even.unfold(0, WINDOW, 1).mean(dim=-1)  # (T - WINDOW + 1, hidden)
    return monotone & (spread > 0), smoothed.diff(n=2, dim=0).square().sum(dim=0)
