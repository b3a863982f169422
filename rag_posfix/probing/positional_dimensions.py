"""Probe of hidden channels that follow the position, and of the scale of one that makes retrieval best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, new_row, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, silent
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.parameters import Integer
from rag_posfix.plan.model_shape import Capability
from rag_posfix.plan.plan import HiddenScale
from rag_posfix.probing.base import PROBES, Probe
from rag_posfix.probing.positional_channels import (
    FEWEST_TOKENS,
    PositionalChannel,
    PositionalChannelsRecord,
    channel_profile,
    find_channels,
    mean_hidden_states,
)
from rag_posfix.probing.prompts import KeyValuePrompt, key_value_prompts, retrieval_losses
from rag_posfix.probing.subject import Change, LanguageModel, Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


FACTORS = (0.5, 0.0, -0.5, -1.0)
CURVES = 4
PLACES = 128


def best_scale(
    model: LanguageModel,
    channels: Sequence[int],
    prompts: Sequence[KeyValuePrompt],
    factors: Sequence[float] = FACTORS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, float, list[dict[str, Any]]]:
    """Return the channel and the factor with the lowest retrieval loss over the gold positions, and all trials.

    Source: Yu et al. (2024), section 3: the channel with the lowest loss at factor 0, then the factor with the lowest
        loss for this channel.

    Args:
        factors: Factors to try, 0 among them.

    Returns:
        Channel, factor, and for each trial ``channel``, ``factor``, ``loss`` and ``by_position``, the unchanged model
        first.
    """
    layers = default_layers(model.n_layers)
    gold = torch.tensor([prompt.gold for prompt in prompts])
    tried: list[dict[str, Any]] = []
    count = 1 + len(channels) + len(factors) - 1

    def trial(channel: int | None, factor: float) -> None:
        def change(prompt: KeyValuePrompt) -> Change:
            scale = None if channel is None else HiddenScale(channel, factor, layers)
            return Change(hidden_scale=scale, prompt_length=len(prompt.ids))

        losses = retrieval_losses(model, prompts, change)
        by_position = [float(losses[gold == position].mean()) for position in sorted(set(gold.tolist()))]
        tried.append({"channel": channel, "factor": factor, "loss": float(losses.mean()), "by_position": by_position})
        if progress is not None:
            progress(len(tried), count)

    trial(None, 1.0)
    for channel in channels:
        trial(channel, 0.0)
    best = min(tried[1:], key=lambda row: float(row["loss"]))["channel"]
    for factor in factors:
        if factor != 0:
            trial(best, factor)
    channel_trials = [row for row in tried if row["channel"] == best]
    return best, float(min(channel_trials, key=lambda row: float(row["loss"]))["factor"]), tried


@PROBES.register("positional-dimensions")
@dataclass(frozen=True)
class PositionalDimensions(Probe):
    """Find the hidden channel that varies most smoothly with the position, and write a profile for hidden_scaling.

    Without ``factor`` the candidates are tried on key-value retrieval: the channel with the lowest loss when set to 0,
    then its factor with the lowest loss over all gold positions. With a factor, or where nothing can be tried, the
    smoothest channel is taken.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 3,
        https://arxiv.org/abs/2406.02536
    Formula: mean over random text of what attention reads, by layer, channel and position; channels whose curve is
        monotone in more than a quarter of the layers, the smoothest first (``rank_channels``). h(p): the broken line
        of least squared error and number of pieces (``segmented_fit``).
    Differs from the paper: the prompts are shorter; a broken line shows where the curve bends.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        top: Number of candidate channels to report.
        factor: Scaling factor of hidden_scaling that the profile contains; searched by default.
        pairs: Pairs of the prompts on which factors are tried; each place is gold once.
        seed: Seed of the random tokens, of keys and of values.
    """

    name: ClassVar[str] = "positional-dimensions"
    source: ClassVar[str] = (
        "Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536"
    )

    strings: Annotated[int, Integer(1)] = 100
    tokens: Annotated[int, Integer(FEWEST_TOKENS)] = 1000
    top: Annotated[int, Integer(1)] = 10
    factor: float | None = None
    pairs: Annotated[int, Integer(2)] = 12
    seed: int = 0

    def check(self) -> None:
        """Check the factor, whose range is that of hidden_scaling."""
        if self.factor is not None:
            create("hidden_scaling", {"factor": self.factor})

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Find the channel and the factor; see ``Probe.run``."""
        self.check()
        with progress("reading random text") as report:
            means = mean_hidden_states(subject, self.strings, self.tokens, self.seed, report)
        candidates = find_channels(subject, means, self.top)
        channel, factor = candidates[0].channel, self.factor if self.factor is not None else 0.0
        tried: list[dict[str, Any]] = []
        if (
            self.factor is None
            and isinstance(subject, LanguageModel)
            and Capability.HIDDEN_CHANNEL in subject.engine.loaded.spec.shape.capabilities
        ):
            prompts = key_value_prompts(subject, self.pairs, self.pairs, self.seed)
            with progress("trying channels and factors") as report:
                channel, factor, tried = best_scale(
                    subject, [candidate.channel for candidate in candidates], prompts, progress=report
                )
        settings = {name: value for name, value in self.parameters.items() if name in ("strings", "tokens", "seed")}
        profile = channel_profile(subject, candidates, channel, factor, settings)
        curves = [self._curve(means, candidate) for candidate in candidates]
        record = PositionalChannelsRecord({**profile, "tried": tried, "curves": curves}).write_profile(out)
        return with_figure(record, self.draw)

    def _curve(self, means: Tensor, candidate: PositionalChannel) -> dict[str, Any]:
        """Return a channel's curve in the middle one of its layers, thinned out, and its broken line."""
        layer = candidate.layers[len(candidate.layers) // 2]
        step = max(1, self.tokens // PLACES)
        values = means[layer, self.tokens % step :, candidate.channel].unfold(0, step, step).mean(dim=-1)
        first = 3 * len(values) // 10  # as where channels are ranked
        segments = segmented_fit(values[first:])
        return {
            "channel": candidate.channel,
            "layer": layer,
            "tokens_per_place": step,
            "values": values.tolist(),
            "segments": [
                {"first": first + a, "last": first + b, "intercept": c - d * first, "slope": d}
                for a, b, c, d in segments
            ],
        }

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the curves of the smoothest channels with their broken lines, and the loss by gold position."""
        figure, (left, right) = new_row(2, (11.0, 3.6))
        for number, curve in enumerate(head["curves"][:CURVES]):
            step, values = curve["tokens_per_place"], curve["values"]
            style = {"color": OTHER_COLORS[number]}
            label = f"channel {curve['channel']}, layer {curve['layer']}"
            left.plot([step * index for index in range(len(values))], values, linewidth=0.8, label=label, **style)
            for segment in curve["segments"]:
                ends = (segment["first"], segment["last"])
                line = [segment["intercept"] + segment["slope"] * end for end in ends]
                left.plot([step * end for end in ends], line, linestyle="--", **style)
        left.set_xlabel("position")
        left.set_title(f"{head['model']}: mean over random text", fontsize=10, loc="left")
        left.legend(frameon=False, fontsize=7)
        trials = [trial for trial in head["tried"] if trial["channel"] in (None, head["channel"])]
        for number, trial in enumerate(trials):
            label = (
                "unchanged" if trial["channel"] is None else f"channel {trial['channel']} times {trial['factor']:g}"
            )
            right.plot(trial["by_position"], marker="o", markersize=4, color=OTHER_COLORS[number], label=label)
        right.set_xlabel("place of the gold pair, from 0")
        right.set_title("retrieval loss (nats per token)", fontsize=10, loc="left")
        if trials:
            right.legend(frameon=False, fontsize=7)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per candidate."""
        losses = {trial["channel"]: f"{trial['loss']:.3f}" for trial in head["tried"] if trial["factor"] == 0}
        rows = [
            (
                str(candidate["channel"]), str(len(candidate["layers"])), f"{candidate['roughness']:.3g}",
                losses.get(candidate["channel"], "not tried"),
            )
            for candidate in head["candidates"]
        ]  # fmt: skip
        return [("channel", "layers with a monotonic trend", "roughness", "retrieval loss at factor 0"), *rows]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return what was chosen, and how the profile is used."""
        head, path = record.head, record.files["profile"]
        tried = [f"retrieval loss of the unchanged model: {head['tried'][0]['loss']:.3f}"] if head["tried"] else []
        return [
            *tried,
            f"chosen: channel {head['channel']}, factor {head['factor']:g}",
            f"profile: {path}",
            f"to use it: --mitigation hidden_scaling:profile={path}",
        ]


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
