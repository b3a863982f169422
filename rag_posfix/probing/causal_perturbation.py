"""Probe of where positions come from: position ids are shifted over a span, or its tokens see less of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.probing.positional_channels import FEWEST_TOKENS, find_channels
from rag_posfix.probing.prompts import (
    KeyValuePrompt,
    check_length,
    key_value_prompts,
    random_strings,
    retrieval_losses,
)
from rag_posfix.probing.subject import Change, Subject, Watch, language_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNCHANGED, SHIFTED, CROPPED = "unchanged", "position ids shifted", "causal mask cropped"


def shifted_positions(tokens: int, first: int, last: int, shift: int) -> Change:
    """Return the change that moves the position ids of a span: t - ``shift`` for first <= t < last."""
    positions = torch.arange(tokens)
    return Change(positions=torch.where((positions >= first) & (positions < last), positions - shift, positions))


def cropped_mask(first: int, last: int, shift: int) -> Change:
    """Return the change that hides the first ``shift`` tokens from the queries of a span."""

    def mask(query: Tensor, key: Tensor) -> Tensor:
        inside = (query >= first) & (query < last)
        return (key <= query) & ~(inside & (key < shift))

    return Change(mask=mask)


def implied_shift(curve: Tensor, changed: Tensor, first: int, last: int, margin: int) -> float:
    """Return by how many tokens a curve's values in a span have moved along the unchanged curve.

    Formula: mean over the span of (changed_t - curve_t) / slope, the least-squares slope of the unchanged curve from
        ``margin`` before the span to its end. 0: the values still belong to their positions.

    Shapes:
        curve, changed: (T,).
    """
    window = curve[max(0, first - margin) : last].double()
    positions = torch.arange(window.shape[0], dtype=torch.float64)
    centred = positions - positions.mean()
    slope = (centred * window).sum() / centred.square().sum()
    return float((changed[first:last].double() - curve[first:last].double()).mean() / slope)


@PROBES.register("causal-perturbation")
@dataclass(frozen=True)
class CausalPerturbation(MeasuredProbe):
    """Shift the position ids of a span, or crop its causal mask, and measure the positional channel and retrieval.

    If the channel follows the position ids, the shift moves it back; if it comes from the causal mask, hiding as many
    tokens moves it back.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 2,
        https://arxiv.org/abs/2406.02536
    Formula: ids: t - shift for first <= t < last. Mask: queries of the span do not see keys below shift. Implied
        shift: how far the channel's mean over random text moves along its own curve (``implied_shift``). Retrieval:
        loss of the value for gold pairs inside and outside the span.
    Differs from the paper: the span's change is told in tokens; the prompts are shorter.

    Args:
        first: First token of the span.
        last: Token after the span.
        shift: By how much ids are shifted, and how many first tokens are hidden.
        tokens: Tokens per sequence of random text.
        strings: Number of random token sequences.
        pairs: Pairs of the retrieval prompts; every fourth is gold once.
        channel: Hidden channel to watch; the smoothest one of this text by default.
        seed: Seed of the random tokens, of keys and of values.
    """

    name: ClassVar[str] = "causal-perturbation"
    source: ClassVar[str] = (
        "Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536"
    )
    deviations: ClassVar[tuple[str, ...]] = ("The effect is told as a shift in tokens.", "The prompts are shorter.")
    reads_text: ClassVar[bool] = True

    first: Annotated[int, Integer(1)] = 400
    last: Annotated[int, Integer(2)] = 600
    shift: Annotated[int, Integer(1)] = 200
    tokens: Annotated[int, Integer(FEWEST_TOKENS)] = 700
    strings: Annotated[int, Integer(1)] = 20
    pairs: Annotated[int, Integer(2)] = 40
    channel: Annotated[int | None, Integer(0)] = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shift <= self.first < self.last <= self.tokens:
            raise ConfigError(
                f"causal-perturbation: shift={self.shift}, first={self.first}, last={self.last}, tokens={self.tokens} "
                "must not fall from left to right, first below last"
            )

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read random text and prompts, unchanged and changed; see ``Probe.run``."""
        model = language_model(subject, self.name)
        check_length(model, self.tokens)
        means = {}
        for name in (UNCHANGED, SHIFTED, CROPPED):
            with progress(f"random text, {name}") as report:
                means[name] = self._means(model, self._change(name, self.tokens), report)
        channel, layer = self._channel(model, means[UNCHANGED])
        curves = {name: mean[layer, :, channel] for name, mean in means.items()}
        span = (self.first, self.last, self.shift)
        prompts = key_value_prompts(model, self.pairs, self.pairs, self.seed)[::4]
        retrieval = {}
        for name in (UNCHANGED, SHIFTED, CROPPED):
            with progress(f"retrieval, {name}") as report:
                losses = retrieval_losses(model, prompts, partial(self._change_of, name), report)
            retrieval[name] = losses.tolist()
        inside = [self.first <= prompt.pairs[prompt.gold].start < self.last for prompt in prompts]
        return Found(
            {
                "channel": channel,
                "layer": layer,
                "implied_shift": {
                    name: implied_shift(curves[UNCHANGED], curves[name], *span) for name in (SHIFTED, CROPPED)
                },
                "curves": {name: curve.tolist() for name, curve in curves.items()},
                "retrieval_loss": {
                    name: {
                        "inside": _mean(losses, inside),
                        "outside": _mean(losses, [not is_inside for is_inside in inside]),
                    }
                    for name, losses in retrieval.items()
                },
                "gold_pairs": {"inside": sum(inside), "outside": len(inside) - sum(inside)},
            },
            [
                {
                    "gold": prompt.gold,
                    "start": prompt.pairs[prompt.gold].start,
                    **{key: retrieval[key][n] for key in retrieval},
                }
                for n, prompt in enumerate(prompts)
            ],
        )

    def _change_of(self, name: str, prompt: KeyValuePrompt) -> Change:
        return self._change(name, prompt.with_answer.shape[1])

    def _change(self, name: str, tokens: int) -> Change:
        if name == SHIFTED:
            return shifted_positions(tokens, self.first, self.last, self.shift)
        return cropped_mask(self.first, self.last, self.shift) if name == CROPPED else Change()

    def _means(self, model: Subject, change: Change, report: Any) -> Tensor:
        total = torch.zeros(model.n_layers, self.tokens, model.width)

        def add(layer: int, states: Tensor) -> None:
            total[layer] += states[0].float().cpu()

        for ids in random_strings(model, self.strings, self.tokens, self.seed, report):
            model.read(ids, Watch(inputs=add), change)
        return total / self.strings

    def _channel(self, model: Subject, means: Tensor) -> tuple[int, int]:
        """Return the channel, and a layer in which it follows the position."""
        if self.channel is None:
            best = find_channels(model, means, 1)[0]
            return best.channel, best.layers[len(best.layers) // 2]
        if self.channel >= model.width:
            raise ConfigError(f"channel={self.channel} must be below {model.width}, the channels of this model")
        return self.channel, model.n_layers // 2

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the channel's curves, and the retrieval loss inside and outside the span."""
        summary, settings = head["summary"], head["settings"]
        figure, (left, right) = new_row(2, (11.0, 3.6))
        for number, (name, curve) in enumerate(summary["curves"].items()):
            left.plot(curve, linewidth=0.8, color=OTHER_COLORS[number], label=name)
            losses = summary["retrieval_loss"][name]
            positions = [index + 0.27 * (number - 1) for index in range(2)]
            heights = [losses[key] or 0.0 for key in ("inside", "outside")]
            right.bar(positions, heights, 0.25, color=OTHER_COLORS[number], label=name)
        left.axvspan(settings["first"], settings["last"], color="#999999", alpha=0.2, linewidth=0)
        left.set_xlabel("position")
        title = f"{head['model']}: channel {summary['channel']}, layer {summary['layer']}"
        left.set_title(title, fontsize=10, loc="left")
        left.legend(frameon=False, fontsize=8)
        right.set_xticks(range(2), ["gold pair inside the span", "outside"])
        right.set_title("retrieval loss (nats per token)", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per change."""
        summary = head["summary"]
        rows = [
            (
                name,
                f"{summary['implied_shift'].get(name, 0.0):.0f}",
                *("" if losses[key] is None else f"{losses[key]:.3f}" for key in ("inside", "outside")),
            )
            for name, losses in summary["retrieval_loss"].items()
        ]
        return [("change", "shift of the channel in tokens", "loss, gold inside", "loss, gold outside"), *rows]


def _mean(values: Sequence[float], chosen: Sequence[bool]) -> float | None:
    selection = [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]
    return sum(selection) / len(selection) if selection else None
