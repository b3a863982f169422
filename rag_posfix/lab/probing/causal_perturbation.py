"""Probe of where positions come from: position ids are shifted over a span, or its tokens see less of the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill as wrap
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, finish_axes, new_column
from rag_posfix.evaluation.record import Progress, counted
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.positional_dimensions import FEWEST_TOKENS, find_channels, mean_hidden_states
from rag_posfix.lab.probing.subject import (
    Change,
    KeyValuePrompt,
    LanguageModel,
    Subject,
    Watch,
    answer_loss,
    check_length,
    key_value_prompts,
    language_model,
    random_strings,
)
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNCHANGED, SHIFTED = "unchanged", "ids shifted"
CROPPED, RANDOM = "cropped, token 0 seen", "random window hidden"
SINK, CROPPED_WITH_SINK = "token 0 alone hidden", "cropped with token 0"
CHANGES = (UNCHANGED, SHIFTED, CROPPED, RANDOM, SINK, CROPPED_WITH_SINK)


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
    caption: ClassVar[str] = (
        "How far a hidden channel and the loss of the answer move if position ids are shifted or tokens are hidden; "
        "do not conclude that other channels get their positions from the same source."
    )
    reads_text: ClassVar[bool] = True
    small: ClassVar[Mapping[str, int]] = {"first": 100, "last": 150, "shift": 50, "tokens": 160, "pairs": 10}

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
        prompts = self.retrieval_prompts(model)
        with progress("random text, changed") as report:
            curves = dict(zip(CHANGES, self.curves(model, channel, layer, report), strict=True))
        with progress("retrieval, changed") as report:
            losses = dict(zip(CHANGES, self.losses(model, prompts, report), strict=True))
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

    def retrieval_prompts(self, model: LanguageModel) -> list[KeyValuePrompt]:
        """Return different prompts whose gold positions are spread evenly."""
        rounds = max(2, -(-self.prompts // self.pairs))  # each asks for every pair once
        every = key_value_prompts(model, self.pairs, rounds * self.pairs, self.seed)
        return [every[number * len(every) // self.prompts] for number in range(self.prompts)]

    def _shift(self, unchanged: Tensor, changed: Tensor) -> dict[str, Any]:
        """Return the implied shift with its interval over strings; both (strings, T)."""
        both = torch.stack((unchanged, changed), dim=1)
        span = (self.first, self.last, self.shift)
        return estimate(both, lambda means: implied_shift(means[..., 0, :], means[..., 1, :], *span))

    def changes(self, rows: Sequence[tuple[str, int]], tokens: int) -> Change:
        """Return the change of a pass with these changes in its rows; a text's number places its random window."""
        ids = torch.arange(tokens)
        shifts = torch.tensor([[self.shift * (name == SHIFTED)] for name, _ in rows])
        hidden = torch.tensor([self._hidden(*row) for row in rows]).T[:, :, None, None, None]

        def mask(query: Tensor, key: Tensor) -> Tensor:  # (B, 1, Tq, Tk)
            start, stop = hidden.to(key.device).unbind()
            inside = (query >= self.first) & (query < self.last)
            return (key <= query) & ~(inside & (key >= start) & (key < stop))

        return Change(ids - shifts * ((ids >= self.first) & (ids < self.last)), mask)

    def _hidden(self, name: str, number: int) -> tuple[int, int]:
        """Return the first key that a change hides from the span, and the key after the last."""
        start = random.Random(f"{self.seed}:{number}").randint(1, self.first - self.shift + 1)
        crop, window = (1, self.shift), (start, start + self.shift - 1)
        return {CROPPED: crop, RANDOM: window, SINK: (0, 1), CROPPED_WITH_SINK: (0, self.shift)}.get(name, (0, 0))

    def curves(self, model: LanguageModel, channel: int, layer: int, report: Callable[[int, int], None]) -> Tensor:
        """Return the channel of each string as it enters the layer, (changes, strings, T).

        No change reaches tokens before the span: they are read once, and the others in a row per change.
        """
        curves = []
        for number, ids in enumerate(random_strings(model, self.strings, self.tokens, self.seed, report)):
            parts: list[Tensor] = []

            def keep(index: int, states: Tensor, parts: list[Tensor] = parts) -> None:
                if index == layer:
                    parts.append(states[..., channel].float().cpu())

            rows = model.read_prefix(ids[0, : self.first].tolist(), Watch(states=keep), len(CHANGES))
            change = self.changes([(name, number) for name in CHANGES], self.tokens)
            model.read(ids[:, self.first :].expand(len(CHANGES), -1), Watch(states=keep), change, prefix=rows)
            curves.append(torch.cat((parts[0].expand(len(CHANGES), -1), parts[1]), dim=1))
        return torch.stack(curves, dim=1)

    def losses(
        self, model: LanguageModel, prompts: Sequence[KeyValuePrompt], report: Callable[[int, int], None]
    ) -> Tensor:
        """Return the loss of each prompt with each change, (changes, prompts) float64.

        Pairs that prompts in a row share are read once for all, but for the random window of each prompt.
        """
        losses = []
        for context, group in groupby(counted(prompts, report), key=lambda prompt: prompt.context):
            asked = list(group)
            tried = [(name, 0) for name in CHANGES if name != RANDOM] + [(RANDOM, prompt.gold) for prompt in asked]
            before = min(self.first, len(context) - 1)
            rows = model.read_prefix(context[:before], rows=len(tried))
            ids = torch.tensor([context[before:]]).expand(len(tried), -1)
            model.read(ids, change=self.changes(tried, len(context)), prefix=rows)
            for prompt in asked:
                chosen = [(name, prompt.gold if name == RANDOM else 0) for name in CHANGES]
                branch = rows.copy(len(context), torch.tensor([tried.index(each) for each in chosen]))
                ids = prompt.with_answer[:, len(context) :].expand(len(chosen), -1)
                change = self.changes(chosen, prompt.with_answer.shape[1])
                logits = model.read(ids, change=change, keep=len(prompt.answer), prefix=branch)
                losses.append(torch.stack([answer_loss(row, prompt) for row in logits]))
        return torch.stack(losses, dim=1)

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
