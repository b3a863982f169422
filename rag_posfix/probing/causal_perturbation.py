"""Probe of where positions come from: position ids are shifted over a span, or its tokens see less of the text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill as wrap
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.probing.intervals import draw_estimates, estimate, shown
from rag_posfix.probing.positional_channels import FEWEST_TOKENS, find_channels, mean_hidden_states
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

UNCHANGED, SHIFTED = "unchanged", "ids shifted"
CROPPED, RANDOM = "cropped, token 0 seen", "random window hidden"
SINK, CROPPED_WITH_SINK = "token 0 alone hidden", "cropped with token 0"
CHANGES = (UNCHANGED, SHIFTED, CROPPED, RANDOM, SINK, CROPPED_WITH_SINK)


def shifted_positions(tokens: int, first: int, last: int, shift: int) -> Change:
    """Return the change that moves the position ids of a span: t - ``shift`` for first <= t < last."""
    positions = torch.arange(tokens)
    return Change(positions=torch.where((positions >= first) & (positions < last), positions - shift, positions))


def hidden_keys(first: int, last: int, keys: range) -> Change:
    """Return the change that hides tokens from the queries of a span."""

    def mask(query: Tensor, key: Tensor) -> Tensor:
        inside = (query >= first) & (query < last)
        return (key <= query) & ~(inside & (key >= keys.start) & (key < keys.stop))

    return Change(mask=mask)


def implied_shift(curve: Tensor, changed: Tensor, first: int, last: int, margin: int) -> Tensor:
    """Return by how many tokens a curve's values in a span have moved along the unchanged curve.

    Formula: mean over the span of (changed_t - curve_t) / slope, the least-squares slope of the unchanged curve from
        ``margin`` before the span to its end. 0: the values still belong to their positions.

    Shapes:
        curve, changed: (..., T). returns: (...).
    """
    window = curve[..., max(0, first - margin) : last].double()
    positions = torch.arange(window.shape[-1], dtype=torch.float64)
    centred = positions - positions.mean()
    slope = (centred * window).sum(dim=-1) / centred.square().sum()
    moved: Tensor = (changed - curve)[..., first:last].double().mean(dim=-1) / slope
    return moved


@PROBES.register("causal-perturbation")
@dataclass(frozen=True)
class CausalPerturbation(MeasuredProbe):
    """Shift position ids or hide tokens; measure the effect.

    If the channel follows the position ids, the shift moves it back; if it counts the tokens that the causal mask
    shows, hiding as many moves it back, whichever they are. Token 0 stays visible: most attention goes to it whatever
    it is (the attention sink), so that hiding it moves states for another reason. Controls: token 0 alone hidden; a
    random window of as many tokens between token 0 and the span hidden.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 2,
        https://arxiv.org/abs/2406.02536
    Formula: ids: t - shift for first <= t < last. Mask: queries of the span do not see keys 1 to shift - 1. Implied
        shift: how far the channel's mean over random text moves along its own curve (``implied_shift``). Retrieval:
        loss of the value for gold pairs inside and outside the span. Intervals: bootstrap over strings and prompts.
    Differs from the paper: token 0 stays visible, and hiding it is a control; the span's change is told in tokens; the
        texts are half as long (there: 400 <= t < 600, shift 200).

    Args:
        first: First token of the span.
        last: Token after the span.
        shift: Shift ids by this much; hide as many first tokens.
        tokens: Tokens per sequence of random text.
        strings: Number of random token sequences.
        pairs: Pairs of the retrieval prompts.
        prompts: Retrieval prompts; gold positions are spread evenly.
        channel: Hidden channel to watch; the smoothest by default.
        seed: Seed of tokens, keys, values and random windows.
    """

    name: ClassVar[str] = "causal-perturbation"
    reads_text: ClassVar[bool] = True

    first: Annotated[int, Integer(1)] = 200
    last: Annotated[int, Integer(2)] = 300
    shift: Annotated[int, Integer(2)] = 100
    tokens: Annotated[int, Integer(FEWEST_TOKENS)] = 320
    strings: Annotated[int, Integer(1)] = 24
    pairs: Annotated[int, Integer(2)] = 20
    prompts: Annotated[int, Integer(2)] = 24
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
        with progress("random text, choosing the channel") as report:
            channel, layer = self._channel(model, report)
        curves, losses = {}, {}
        every = key_value_prompts(model, self.pairs, 2 * self.pairs, self.seed)
        prompts = [every[number * len(every) // self.prompts] for number in range(self.prompts)]
        for name in CHANGES:
            with progress(f"random text, {name}") as report:
                curves[name] = self._curves(model, name, channel, layer, report)
            with progress(f"retrieval, {name}") as report:
                losses[name] = retrieval_losses(model, prompts, partial(self._change_of, name), report)
        inside = torch.tensor([self.first <= prompt.pairs[prompt.gold].start < self.last for prompt in prompts])

        def by_place(values: Tensor) -> dict[str, Any]:
            places = {"inside": inside, "outside": ~inside}
            return {key: estimate(values[chosen]) if chosen.any() else None for key, chosen in places.items()}

        rows = [
            {
                "gold": prompt.gold,
                "start": prompt.pairs[prompt.gold].start,
                **{key: float(values[n]) for key, values in losses.items()},
            }
            for n, prompt in enumerate(prompts)
        ]
        return Found(
            {
                "channel": channel,
                "layer": layer,
                "strings": self.strings,
                "prompts": len(prompts),
                "implied_shift": {name: self._shift(curves[UNCHANGED], curves[name]) for name in CHANGES[1:]},
                "curves": {name: curve.mean(dim=0).tolist() for name, curve in curves.items()},
                "retrieval_loss": {name: by_place(values) for name, values in losses.items()},
                "change_of_loss": {name: by_place(losses[name] - losses[UNCHANGED]) for name in CHANGES[1:]},
            },
            rows,
        )

    def _shift(self, unchanged: Tensor, changed: Tensor) -> dict[str, Any]:
        """Return the implied shift with its interval over strings; both (strings, T)."""
        both = torch.stack((unchanged, changed), dim=1)
        span = (self.first, self.last, self.shift)
        return estimate(both, lambda means: implied_shift(means[..., 0, :], means[..., 1, :], *span))

    def _change_of(self, name: str, prompt: KeyValuePrompt) -> Change:
        return self.change_of(name, prompt.with_answer.shape[1], prompt.gold)

    def change_of(self, name: str, tokens: int, number: int) -> Change:
        """Return a change; the number of the text decides where its random window is."""
        if name == SHIFTED:
            return shifted_positions(tokens, self.first, self.last, self.shift)
        start = random.Random(f"{self.seed}:{number}").randint(1, self.first - self.shift + 1)
        keys = {
            CROPPED: range(1, self.shift),
            RANDOM: range(start, start + self.shift - 1),
            SINK: range(1),
            CROPPED_WITH_SINK: range(self.shift),
        }
        return hidden_keys(self.first, self.last, keys[name]) if name in keys else Change()

    def _curves(self, model: Subject, name: str, channel: int, layer: int, report: Any) -> Tensor:
        """Return the channel of each string as it enters the layer, (strings, T)."""
        curves: list[Tensor] = []

        def keep(index: int, states: Tensor) -> None:
            if index == layer:
                curves.append(states[0, :, channel].float().cpu())

        for number, ids in enumerate(random_strings(model, self.strings, self.tokens, self.seed, report)):
            model.read(ids, Watch(states=keep), self.change_of(name, self.tokens, number))
        return torch.stack(curves)

    def _channel(self, model: Subject, report: Any) -> tuple[int, int]:
        """Return the channel, and a layer in which it follows the position."""
        if self.channel is None:
            means, _ = mean_hidden_states(model, self.strings, self.tokens, self.seed, report)
            best = find_channels(model, means, 1)[0]
            return best.channel, best.layers[len(best.layers) // 2]
        if self.channel >= model.width:
            raise ConfigError(f"channel={self.channel} must be below {model.width}, the channels of this model")
        return self.channel, model.n_layers // 2

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the channel's curves, its shift in tokens, and the change of the retrieval loss."""
        summary, settings = head["summary"], head["settings"]
        figure, (top, middle, bottom) = new_column(3, 3.5)
        for number, (name, curve) in enumerate(summary["curves"].items()):
            top.plot(curve, linewidth=0.9, color=OTHER_COLORS[number], label=name)
        top.axvspan(settings["first"], settings["last"], color="#999999", alpha=0.2, linewidth=0)
        title = f"channel {summary['channel']} before layer {summary['layer']}, {summary['strings']} strings"
        finish_axes(top, title, "position (grey: the changed span)", "mean of the channel", columns=2)
        names = list(summary["implied_shift"])
        for number, name in enumerate(names):
            style: dict[str, Any] = {"color": OTHER_COLORS[number + 1], "across": True}
            draw_estimates(middle, [number], [summary["implied_shift"][name]], **style)
            for key, fill in (("inside", "full"), ("outside", "none")):
                change = summary["change_of_loss"][name][key]
                if change is not None:
                    at = number + (0.15 if key == "outside" else -0.15)
                    label = f"gold pair {key} the span, n = {change['n']}" if number == 0 else None
                    draw_estimates(bottom, [at], [change], **style, fillstyle=fill, label=label)
        for axes in (middle, bottom):
            axes.set_yticks(range(len(names)), [wrap(name, 14) for name in names], fontsize=9)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.axvline(0, color="#999999", linewidth=0.8)
        middle.axvline(-settings["shift"], color="#999999", linestyle=":")
        title = f"shift of the channel, {summary['strings']} strings, 95 % interval"
        finish_axes(middle, title, f"tokens along its own curve (dotted: -{settings['shift']})", "", legend=False)
        finish_axes(bottom, "change of the retrieval loss, 95 % interval", "nats per token", "")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per change."""
        summary = head["summary"]
        n = {key: 0 if entry is None else entry["n"] for key, entry in summary["retrieval_loss"][UNCHANGED].items()}
        rows = [
            (
                name,
                shown(summary["implied_shift"][name], "+.0f") if name != UNCHANGED else "",
                *(shown(losses[key]) for key in ("inside", "outside")),
            )
            for name, losses in summary["retrieval_loss"].items()
        ]
        headings = [f"loss, gold {key}, n = {count}" for key, count in n.items()]
        return [("change", f"shift of the channel in tokens, n = {summary['strings']}", *headings), *rows]
