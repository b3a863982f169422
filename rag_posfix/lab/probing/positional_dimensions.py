"""Probe of hidden channels that follow the position, and of the scale of one that makes retrieval best.

Probe of hidden channels that vary with the position for any text; it writes a profile for ``hidden_scaling``.

Depends on loaded models and hidden states only; of the methods, on the one that reads the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, finish_axes, new_column, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent
from rag_posfix.lab.probing.base import PROBES, Probe, ProfileRecord, shown
from rag_posfix.lab.probing.scale_trials import ScaleTrials, best_scale, held_out, random_channels
from rag_posfix.lab.probing.subject import (
    LanguageModel,
    Subject,
    Watch,
    check_length,
    key_value_prompts,
    random_strings,
)
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


CURVES = 3
PLACES = 128


@PROBES.register("positional-dimensions")
@dataclass(frozen=True)
class PositionalDimensions(Probe):
    """Find the positional channel; write a profile for hidden_scaling.

    Without ``factor`` the candidates are tried on key-value retrieval: the channel with the lowest loss when set to 0,
    then its factor with the lowest loss over all gold positions. With a factor the smoothest channel is
    taken, and so it is, as a finding only, of models that ``hidden_scaling`` cannot run on.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 3,
        https://arxiv.org/abs/2406.02536
    Formula: mean over random text of the residual stream, by layer, channel and position; channels whose curve rises,
        or falls, in more than a quarter of the layers, the smoothest first (``rank_channels``). h(p): the broken line
        of least squared error and number of pieces (``segmented_fit``, ``broken_line``), with the share of the curve's
        squared deviation that it leaves. Held out: other prompts, the factors -2 to 2, and random channels of like
        size that do not follow the position (``held_out``).
    Differs from the paper: the prompts are shorter and fewer; more factors are tried; controls on other prompts.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        top: Number of candidate channels to report.
        factor: Write this factor of hidden_scaling; searched by default.
        pairs: Pairs per prompt; the gold position goes round.
        prompts: Prompts to choose on, and as many held out.
        seed: Seed of tokens, keys, values and random channels.
    """

    name: ClassVar[str] = "positional-dimensions"
    caption: ClassVar[str] = (
        "Hidden channels that follow the position, and the retrieval loss if one is scaled; do not conclude that a "
        "channel causes the bias unless it does more than the random channels."
    )
    small: ClassVar[Mapping[str, int]] = {"tokens": 256, "pairs": 5}

    strings: Annotated[int, Integer(1)] = 24
    tokens: Annotated[int, Integer(FEWEST_TOKENS)] = 640
    top: Annotated[int, Integer(1)] = 10
    factor: float | None = None
    pairs: Annotated[int, Integer(2)] = 8
    prompts: Annotated[int, Integer(2)] = 24
    seed: int = 0

    def check(self) -> None:
        """Check the factor, whose range is that of hidden_scaling."""
        if self.factor is not None:
            create("hidden_scaling", {"factor": self.factor})

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Find the channel and the factor; see ``Probe.run``."""
        self.check()
        with progress("reading random text") as report:
            means, after_norm = mean_hidden_states(subject, self.strings, self.tokens, self.seed, report)
        candidates = find_channels(subject, means, self.top)
        following = [entry.channel for entry in rank_channels(means, None)]
        channel, factor, refused = candidates[0].channel, self.factor, _refusal(subject)
        tried: list[dict[str, Any]] = []
        controlled: dict[str, Any] = {}
        if factor is None and isinstance(subject, LanguageModel) and refused is None:
            channels = [candidate.channel for candidate in candidates]
            prompts, others = (
                key_value_prompts(subject, self.pairs, self.prompts, seed) for seed in (self.seed, self.seed + 1)
            )
            with progress("trying channels and factors") as report:
                channel, factor, tried = best_scale(ScaleTrials(subject, prompts), channels, progress=report)
            with progress("controls on other prompts") as report:
                controls = random_channels(subject, prompts, channel, following, self.seed)
                trials = ScaleTrials(subject, others)
                controlled = {"held_out": held_out(trials, channel, factor, channels, controls, report)}
        settings = {name: value for name, value in self.parameters.items() if name not in ("top", "factor")}
        profile = channel_profile(subject, candidates, channel, factor, settings)
        counts = {
            "residual stream, one direction": len(following),
            "residual stream, both directions": len(rank_channels(means, None, one_direction=False)),
            "after the norm, both directions": len(rank_channels(after_norm, None, one_direction=False)),
        }
        curves = [self._curve(means, candidate) for candidate in candidates]
        head = {**profile, "refused": refused, "dtype": subject.facts()["dtype"], "channels_that_follow": counts,
                "tried": tried}  # fmt: skip
        printed = {name: name for name in ("channel", "factor", "layers", "candidates")}
        record = ProfileRecord({**head, **controlled, "curves": curves}, printed=printed)
        return with_figure(record.write_profile(out, self.name), self.draw, self.caption)

    def _curve(self, means: Tensor, candidate: PositionalChannel) -> dict[str, Any]:
        """Return a channel's curve in the middle one of its layers, thinned out, and its broken line."""
        layer = candidate.layers[len(candidate.layers) // 2]
        step = max(1, self.tokens // PLACES)
        values = means[layer, self.tokens % step :, candidate.channel].unfold(0, step, step).mean(dim=-1)
        first = 3 * len(values) // 10  # as where channels are ranked
        segments = [(first + a, first + b, c - d * first, d) for a, b, c, d in segmented_fit(values[first:])]
        left = values[first:].double() - broken_line(segments, torch.arange(first, len(values)))
        deviation = values[first:].double() - values[first:].double().mean()
        return {
            "channel": candidate.channel,
            "layer": layer,
            "tokens_per_place": step,
            "values": values.tolist(),
            "segments": [dict(zip(("first", "last", "intercept", "slope"), part, strict=True)) for part in segments],
            "residual": float(left.square().sum() / deviation.square().sum().clamp(min=1e-12)),
        }

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return curves with h(p), the chosen channel first, each on a scale of its own; and the trials."""
        chosen = [curve for curve in head["curves"] if curve["channel"] == head["channel"]]
        curves = (chosen + [curve for curve in head["curves"] if curve not in chosen])[:CURVES]
        figure, axes = new_column(len(curves) + (3 if "held_out" in head else 0), 2.4)
        for number, (panel, curve) in enumerate(zip(axes, curves, strict=False)):
            step, values, style = curve["tokens_per_place"], curve["values"], {"color": OTHER_COLORS[number]}
            panel.plot([step * index for index in range(len(values))], values, linewidth=0.8, **style)
            for part in curve["segments"]:
                ends = (part["first"], part["last"])
                line = [part["intercept"] + part["slope"] * end for end in ends]
                panel.plot([step * end for end in ends], line, linestyle="--", color="#000000")
            which = "chosen: " if curve["channel"] == head["channel"] else ""
            title = f"{which}channel {curve['channel']} before layer {curve['layer']}"
            finish_axes(panel, f"{title}, {head['settings']['strings']} strings", "position",
                        "channel; dashed: h(p)", legend=False)  # fmt: skip
        if "held_out" in head:
            _draw_held_out(axes[-3:], head["channel"], head["factor"], head["held_out"])
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per candidate."""
        changes = {trial["channel"]: shown(trial["change"], "+.2f") for trial in head["tried"] if trial["factor"] == 0}
        left = {curve["channel"]: curve["residual"] for curve in head["curves"]}
        rows = [
            (
                str(candidate["channel"]), str(len(candidate["layers"])), f"{candidate['roughness']:.2g}",
                f"{left[candidate['channel']]:.2f}", changes.get(candidate["channel"], "not tried"),
            )
            for candidate in head["candidates"]
        ]  # fmt: skip
        n = f", n = {head['settings']['prompts']}" if head["tried"] else ""
        return [
            ("channel", "layers in one direction", "roughness", "left by h(p)", f"change of the loss at factor 0{n}"),
            *rows,
        ]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return what was chosen, what the controls say of it, and how the profile is used, if it can be."""
        head, path = record.head, record.files["profile"]
        controls = _control_lines(head["held_out"], head["factor"]) if "held_out" in head else []
        factor = "not tried" if head["factor"] is None else f"{head['factor']:g}"
        lines = [f"chosen: channel {head['channel']}, factor {factor}", *controls]
        if (refused := head.get("refused")) is not None:
            return [
                *lines,
                f"hidden_scaling cannot be used with this model ({refused}); the channel is a finding only",
                f"record: {path}",
            ]
        return [*lines, f"profile: {path}", f"to use it: --mitigation hidden_scaling:profile={path}"]


def _refusal(subject: Subject) -> str | None:
    """Return why ``hidden_scaling`` cannot run on this model, or None if it can."""
    if not isinstance(subject, LanguageModel):
        return "methods need a language model, and this is a small decoder"
    return create("hidden_scaling").refusal(subject.engine.loaded.spec.shape)


def _control_lines(controlled: Mapping[str, Any], factor: float) -> list[str]:
    """Return the answers of held-out prompts: does the channel matter, do candidates, and does the factor."""
    monotony, causality, scaling = (controlled[key] for key in ("monotony", "causality", "scaling"))
    chosen = next(row for row in controlled["doses"] if row["factor"] == factor)
    n, correlation = controlled["prompts"], monotony["rank_correlation"]
    return [
        f"on {n} other prompts: loss {shown(controlled['unchanged'])}; chosen: {shown(chosen['change'], '+.2f')}",
        f"less the mean of {len(controlled['random'])} random channels of like size: "
        f"{shown(causality['chosen_less_random'], '+.2f')}; {causality['random_as_low']} of them are as low",
        f"all candidates less random channels: {shown(monotony['candidates_less_random'], '+.2f')}; rank "
        f"correlation of roughness and change: {'none' if correlation is None else f'{correlation:+.2f}'}",
        f"chosen factor less factor 0: {shown(scaling['chosen_less_zero'], '+.2f')}; lowest here: factor "
        f"{scaling['best_factor']:g}",
    ]


def _draw_held_out(axes: Sequence[Any], channel: int, factor: float, controlled: Mapping[str, Any]) -> None:
    """Draw dose and response, the factor in other channels, and the loss by place."""
    (dose, null, places), n = axes, controlled["prompts"]
    factors = [row["factor"] for row in controlled["doses"]]
    draw_estimates(dose, factors, [row["change"] for row in controlled["doses"]], fmt="o-", color=OTHER_COLORS[0])
    dose.axhline(0, color="#999999", linewidth=0.8)
    finish_axes(dose, f"channel {channel}: {n} held-out prompts, 95 % interval", "factor",
                "change of loss\n(nats per token)", legend=False)  # fmt: skip
    groups = {"random channels": controlled["random"], "candidates": controlled["candidates"]}
    start = 0
    for number, (label, rows) in enumerate(groups.items()):
        at, changes = range(start, start + len(rows)), [row["change"] for row in rows]
        draw_estimates(null, at, changes, color=OTHER_COLORS[number + 1], label=label)
        start += len(rows)
    names = [str(row["channel"]) for rows in groups.values() for row in rows]
    null.set_xticks(range(start), names, rotation=60, fontsize=9)
    null.axhline(0, color="#999999", linewidth=0.8)
    title = f"factor {factor:g} elsewhere, {n} prompts, 95 % interval"
    finish_axes(null, title, "channel", "change of loss\n(nats per token)", columns=2, below=52)
    for number, row in enumerate(row for row in controlled["doses"] if row["factor"] in (0.0, 2.0, factor)):
        label = f"factor {row['factor']:g}"
        places.plot(row["by_position"], marker="o", markersize=4, color=OTHER_COLORS[number], label=label)
    title = f"loss by place, {n / len(row['by_position']):g} held-out prompts a place"
    finish_axes(places, title, "place of the gold pair, from 0",
                "nats per token", columns=3)  # fmt: skip


Segment = tuple[int, int, float, float]
"""First and last position of a segment, both included, and intercept and slope of its line over the positions."""


def segmented_fit(curve: Tensor, penalty: float = 0.01) -> list[Segment]:
    """Return the line segments with the least total cost of squared error and number.

    Source: Bellman (1961), On the approximation of curves by line segments using dynamic programming,
        https://doi.org/10.1145/366573.366611
    Formula: minimise sum over pieces of (least squared error of a line on it + C), C = ``penalty`` times the squared
        deviation of the whole curve from its mean, by OPT(j) = min_i (e_ij + C + OPT(i - 1)).
    Cost: O(T^2) numbers.

    Args:
        penalty: Price of a piece, as a share of the curve's squared deviation, above 0.

    Shapes:
        curve: (T,), two places or more.
    """
    count = curve.shape[0]
    if count < 2 or penalty <= 0:
        raise ConfigError(
            f"no fit of {count} places with penalty={penalty}; it takes two places and a penalty above 0"
        )
    values = curve.double() - curve.double().mean()
    price = penalty * max(float(values.square().sum()), 1e-12)
    errors = _errors(values)  # (T, T), [first, last]
    best, came = [0.0], [0]
    for last in range(count):
        costs = errors[: last + 1, last] + torch.tensor(best[: last + 1], dtype=torch.float64) + price
        first = int(costs.argmin())
        best.append(float(costs[first]))
        came.append(first)
    segments, last = [], count - 1
    while last >= 0:
        first = came[last + 1]
        segments.append(_line(curve.double(), first, last))
        last = first - 1
    return segments[::-1]


def broken_line(segments: Sequence[Segment], places: Tensor) -> Tensor:
    """Return h(p), the value of a broken line at places; before the first piece and after the last, their lines.

    Shapes:
        places: (N,). returns: (N,) float64.
    """
    starts = torch.tensor([segment[0] for segment in segments[1:]])
    piece = torch.bucketize(places, starts, right=True)
    lines = torch.tensor([segment[2:] for segment in segments], dtype=torch.float64)[piece]  # (N, 2)
    line: Tensor = lines[:, 0] + lines[:, 1] * places
    return line


def _errors(values: Tensor) -> Tensor:
    """Return the squared error of the best line on each piece, (T, T) by first and last place."""
    positions = torch.arange(values.shape[0], dtype=torch.float64)

    def between(terms: Tensor) -> Tensor:
        total = torch.cat((terms.new_zeros(1), terms.cumsum(0)))
        return total[None, 1:] - total[:-1, None]  # [first, last]

    n, x, y = between(torch.ones_like(positions)), between(positions), between(values)
    xx, xy, yy = between(positions * positions), between(positions * values), between(values * values)
    n = n.clamp(min=1)
    spread = xx - x * x / n
    slope = torch.where(spread > 1e-9, (xy - x * y / n) / spread.clamp(min=1e-9), 0.0)
    return (yy - y * y / n - slope * (xy - x * y / n)).clamp(min=0).triu()


def _line(values: Tensor, first: int, last: int) -> Segment:
    positions = torch.arange(first, last + 1, dtype=torch.float64)
    segment = values[first : last + 1]
    centred = positions - positions.mean()
    spread = float(centred.square().sum())
    slope = float((centred * segment).sum()) / spread if spread else 0.0
    return first, last, float(segment.mean()) - slope * float(positions.mean()), slope
