"""Probe that doubles one attention score and looks whether the answer moves to what the score belongs to."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, finish_axes, new_column
from rag_posfix.evaluation.record import Progress, counted
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.subject import (
    Change,
    KeyValuePrompt,
    LanguageModel,
    Subject,
    Watch,
    key_value_prompts,
    language_model,
)
from rag_posfix.parameters import Integer, Number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = 8
FACTORS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of an answer where the requested value and another value differ.

    Attributes:
        ids: The tokens before it.
        gold, other: The token of the requested value, and the token of the other value.
        gold_at, other_at: Their positions in ``ids``.
        third_at: The position of the same token of a pair that is neither.
    """

    ids: tuple[int, ...]
    gold: int
    other: int
    gold_at: int
    other_at: int
    third_at: int


def choice_of(prompt: KeyValuePrompt, other: int) -> Choice | None:
    """Return the first token at which the gold value of a prompt and another value differ; None if there is none."""
    start = prompt.values[other].start
    rival = prompt.ids[prompt.values[other].slice]
    for step, (gold_token, rival_token) in enumerate(zip(prompt.answer, rival, strict=False)):
        if gold_token != rival_token:
            gold_at = prompt.values[prompt.gold].start + step
            third = next(n for n in range(len(prompt.values)) if n not in (prompt.gold, other))
            third_at = min(prompt.values[third].start + step, prompt.values[third].stop - 1)
            return Choice(prompt.ids + prompt.answer[:step], gold_token, rival_token, gold_at, start + step, third_at)
    return None


def scaled_score(
    key: int, factor: float, layer: int | None = None, heads: Sequence[int] | None = None
) -> Callable[[int, Tensor], Tensor]:
    """Return the edit of the score of the last query for one key.

    Formula: s' = s + (factor - 1) |s|. With factor 2 a score above 0 is doubled, one below 0 becomes 0, so that both
        rise by their size.

    Args:
        layer: The layer; None edits all.
        heads: The heads; None edits all.
    """

    def edit(index: int, scores: Tensor) -> Tensor:
        if layer is not None and index != layer:
            return scores
        chosen = slice(None) if heads is None else list(heads)
        edited = scores.clone()
        key_scores = edited[:, chosen, -1, key]
        edited[:, chosen, -1, key] = key_scores + (factor - 1) * key_scores.abs()
        return edited

    return edit


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit of one score; see ``scaled_score``. ``third``: of the score for a pair that is neither."""

    factor: float
    layer: int | None = None
    heads: tuple[int, ...] | None = None
    third: bool = False

    def of(self, choice: Choice) -> Callable[[int, Tensor], Tensor]:
        """Return the edit for the pass that reads a choice."""
        key = choice.third_at if self.third else choice.other_at
        return scaled_score(key, self.factor, self.layer, self.heads)


@PROBES.register("attention-edit")
@dataclass(frozen=True)
class AttentionEdit(MeasuredProbe):
    """Double one attention score; measure the answer's change.

    The last token's score for another value is doubled, layer by layer and in single heads.

    It tests whether attention to a place causes the answer, where other probes see both together.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, section 2,
        https://arxiv.org/abs/2406.02536
    Formula: s'_Tj = s_Tj + (factor - 1) |s_Tj| for one key j, the token of another pair's value where it differs
        from that asked for. Shift: change of log p(other) - log p(gold) for the next token. Moved: share of prompts
        in which the other token becomes the more likely of the two.
        Controls: the same edit of the score for a third pair's value in all layers; random other heads of the layers
        of the strongest heads; the factors -2 to 2. Intervals: bootstrap over prompts.
    Differs from the paper: single layers and heads beside all layers; controls; keys and values are short.

    Args:
        pairs: Pairs of a prompt, 3 or more.
        prompts: Number of prompts; the gold position goes round.
        factor: What scores are multiplied by.
        seed: Seed of keys and values, and of the random heads.
    """

    name: ClassVar[str] = "attention-edit"
    caption: ClassVar[str] = (
        "How far the answer moves to another value if the last token's score for it is multiplied, by layer, head and "
        "factor; do not conclude that what moves nothing alone does nothing together."
    )
    reads_text: ClassVar[bool] = True

    pairs: Annotated[int, Integer(3)] = 3
    prompts: Annotated[int, Integer(1)] = 24
    factor: Annotated[float, Number(-100, 100)] = 2.0
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read the prompts with each edit; see ``Probe.run``."""
        model = language_model(subject, self.name)
        candidates = [
            choice_of(prompt, (prompt.gold + 1) % self.pairs)
            for prompt in key_value_prompts(model, self.pairs, self.prompts, self.seed)
        ]
        choices = [choice for choice in candidates if choice is not None]
        heads = _strongest_heads(model, choices)
        layers = {f"layer {layer}": Edit(self.factor, layer) for layer in range(model.n_layers)}
        dosed = {"all layers": Edit(self.factor), _name(*heads[0]): Edit(self.factor, heads[0][0], (heads[0][1],))}
        edits: dict[str, dict[str, Edit]] = {
            "unchanged": {"": Edit(1.0)},
            "edits": {
                "all layers": Edit(self.factor),
                **layers,
                **{_name(layer, head): Edit(self.factor, layer, (head,)) for layer, head in heads},
            },
            "random_heads": {
                _name(layer, head): Edit(self.factor, layer, (head,))
                for layer, head in _random_heads(model, heads, self.seed)
            },
            "controls": {"all layers, a third pair": Edit(self.factor, third=True)},
            **{
                f"doses, {name}": {f"{factor:g}": replace(edit, factor=factor) for factor in FACTORS}
                for name, edit in dosed.items()
            },
        }
        tried = [(group, *member) for group, members in edits.items() for member in members.items()]
        with progress("editing scores") as report:
            every = [_preferences(model, choice, [edit for *_, edit in tried]) for choice in counted(choices, report)]
        unchanged, *changed = torch.stack(every, dim=1)  # (choices,) each
        summary: dict[str, Any] = {group: {} for group in edits}
        summary["unchanged"] = {
            "gold_preferred": estimate((unchanged < 0).double()),
            "preference": estimate(unchanged),
        }
        for (group, label, _), after in zip(tried[1:], changed, strict=True):
            moved = ((unchanged < 0) & (after > 0)).double()
            summary[group][label] = {"shift": estimate(after - unchanged), "moved": estimate(moved)}
        rows = [
            {"group": group, "edit": label, "after": after.tolist()}
            for (group, label, _), after in zip(tried, (unchanged, *changed), strict=True)
        ]
        return Found(summary, rows)

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the shift by layer, in strongest and random heads, and by factor."""
        figure, (top, middle, bottom) = new_column(3, 3.1)
        summary = head["summary"]
        n, factor = summary["unchanged"]["preference"]["n"], head["settings"]["factor"]
        layers = [edit["shift"] for key, edit in summary["edits"].items() if re.fullmatch(r"layer \d+", key)]
        draw_estimates(top, range(len(layers)), layers, color=OTHER_COLORS[1])
        title = f"score times {factor:g} in one layer, {n} prompts, 95 % interval"
        finish_axes(top, title, "layer, all heads", "shift to the other\nvalue (nats)", legend=False)
        groups = {"heads that attend most": "edits", "random heads of these layers": "random_heads"}
        names: list[str] = []
        for number, (label, group) in enumerate(groups.items()):
            shifts = {key: edit["shift"] for key, edit in summary[group].items() if "head" in key}
            at = range(len(names), len(names) + len(shifts))
            draw_estimates(middle, at, shifts.values(), color=OTHER_COLORS[2 - number], label=label)
            names += [".".join(re.findall(r"\d+", key)) for key in shifts]
        middle.set_xticks(range(len(names)), names, rotation=60, fontsize=9)
        finish_axes(middle, f"in one head, {n} prompts, 95 % interval", "layer.head", "shift (nats)", below=52)
        for number, group in enumerate(key for key in summary if key.startswith("doses")):
            by_factor = {float(key): edit["shift"] for key, edit in summary[group].items()}
            label = group.removeprefix("doses, ")
            draw_estimates(bottom, by_factor, by_factor.values(), fmt="o-", color=OTHER_COLORS[number], label=label)
        finish_axes(bottom, f"by factor, {n} prompts, 95 % interval", "factor", "shift (nats)", columns=2)
        for axes in (top, middle, bottom):
            axes.axhline(0, color="#999999", linewidth=0.8)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return the edits with the largest shift, and the controls."""
        summary = head["summary"]
        largest = sorted(summary["edits"].items(), key=lambda item: -abs(item[1]["shift"]["value"]))[:10]
        controls = [(f"random: {label}", edit) for label, edit in summary["random_heads"].items()]
        rows = [
            (label, shown(edit["shift"], "+.2f"), shown(edit["moved"]))
            for label, edit in (*largest, *summary["controls"].items(), *controls)
        ]
        n = summary["unchanged"]["preference"]["n"]
        return [("edited", f"shift to the other value (nats), n = {n}", "share of answers that moved"), *rows]


def _name(layer: int, head: int) -> str:
    return f"layer {layer}, head {head}"


def _random_heads(model: Subject, heads: Sequence[tuple[int, int]], seed: int) -> list[tuple[int, int]]:
    """Return as many other heads, each of the layer of one of these."""
    generator = random.Random(seed)
    chosen: list[tuple[int, int]] = []
    for layer, _ in heads:
        left = [(layer, n) for n in range(model.n_heads) if (layer, n) not in heads and (layer, n) not in chosen]
        chosen += [generator.choice(left)] if left else []
    return chosen


def _preferences(model: LanguageModel, choice: Choice, edits: Sequence[Edit]) -> Tensor:
    """Return log p(other) - log p(gold) of the next token with each edit, (len(edits),) float64.

    Edits change the last token alone: the tokens before it are read once, then the last token in a row per edit.
    """
    rows = model.read_prefix(choice.ids[:-1], rows=len(edits))
    changes = [edit.of(choice) for edit in edits]

    def edited(layer: int, scores: Tensor) -> Tensor:
        return torch.cat([change(layer, row) for change, row in zip(changes, torch.split(scores, 1), strict=True)])

    last = torch.tensor([choice.ids[-1:]]).expand(len(edits), 1)
    logits = model.read(last, change=Change(scores=edited), prefix=rows)[:, 0].double().cpu()
    preferences: Tensor = logits[:, choice.other] - logits[:, choice.gold]
    return preferences


def _strongest_heads(model: Subject, choices: Sequence[Choice]) -> list[tuple[int, int]]:
    """Return the heads that attend most to the requested value."""
    total = torch.zeros(model.n_layers, model.n_heads)
    for choice in choices:

        def add(layer: int, weights: Tensor, position: int = choice.gold_at) -> None:
            total[layer] += weights[0, :, -1, position].cpu()

        model.read(torch.tensor([choice.ids]), Watch(weights=add))
    order = total.flatten().argsort(descending=True)[:HEADS].tolist()
    return [divmod(index, model.n_heads) for index in order]
