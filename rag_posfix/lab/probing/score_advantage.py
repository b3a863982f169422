"""Probe of the bound on how far away a word is found, by its score advantage and what positions give per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, draw_estimates, finish_axes, new_column
from rag_posfix.evaluation.record import ExperimentRecord, Progress, counted
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, estimate, shown
from rag_posfix.lab.probing.subject import LanguageModel, Subject, Watch, check_length
from rag_posfix.parameters import Integer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = 1
"""The first token is no distractor: much attention goes to it whatever it is."""
SMALLEST = 1e-30
ONCE = "same length, once"
TEXTS = {"twice the length, once": (2, 1), "same length, twice": (1, 2), "same length, four times": (1, 4)}
"""Texts that are compared with the first: how many times as long, and how often the word occurs."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantage:
    """What decides in each head whether a word is found.

    Shapes:
        words, steps: (L, H), D and d in nats. predicted: (L, H), the distance D / d beyond the nearest distractor, inf
        where D > 0 and d <= 0, 0 where D <= 0. measured: (L, H), inf where the word wins at all tested distances.
    """

    words: Tensor
    steps: Tensor
    predicted: Tensor
    measured: Tensor


def score_curves(
    subject: Subject,
    distances: Sequence[int],
    strings: int,
    tokens: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    occurrences: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the scores of the last token for its own word at distances, and for other words at all distances.

    A text of random tokens has a word for each distance, which is nowhere else, or, with more occurrences, at random
    places too. It is read with each of the words as the last token. Scores are log-probabilities of attention, less
    their mean over what is none of these words: softmax leaves differences as they are.

    Shapes:
        returns: (strings, L, H, len(distances)), and (strings, L, H, T): the other words at distance 1 to T, the
            largest of ``distances``, averaged over the last tokens of a string; float64.
    """
    shape, farthest = (strings, subject.n_layers, subject.n_heads), max(distances)
    target = torch.zeros(*shape, len(distances), dtype=torch.float64)
    other = torch.zeros(*shape, farthest, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    at = torch.tensor(distances) - 1
    for string in counted(range(strings), progress):
        vocabulary = torch.randperm(subject.vocabulary, generator=generator)
        words, others = vocabulary[: len(at)], vocabulary[len(at) :]
        ids = others[torch.randint(0, len(others), (tokens - 1,), generator=generator)]
        free = torch.randperm(tokens - 1 - FIRST, generator=generator)
        free = free[~torch.isin(free, at)][: len(at) * (occurrences - 1)].view(len(at), -1)
        copies = torch.cat((at[:, None], free), dim=1)  # (distances, occurrences), counted back from the last token
        ids[-1 - copies] = words[:, None]
        is_other = torch.ones(len(at), 1, tokens - 1 - FIRST, dtype=torch.bool)
        is_other.scatter_(2, copies[:, None], value=False)

        def add(layer: int, weights: Tensor, string: int = string, is_other: Tensor = is_other) -> None:
            rows = weights[:, :, -1, FIRST:-1].double().cpu().clamp(min=SMALLEST).log().flip(-1)  # distance 1 first
            rows = rows - rows[..., is_other.all(dim=0)[0]].mean(dim=-1, keepdim=True)
            target[string, layer] = rows[torch.arange(len(at)), :, at].T
            near = is_other[..., :farthest]
            other[string, layer] = (rows[..., :farthest] * near).sum(dim=0) / near.sum(dim=0).clamp(min=1)

        _read_with_each(subject, ids, words, Watch(weights=add))
    return target, other


def _read_with_each(subject: Subject, ids: Tensor, words: Tensor, watch: Watch) -> None:
    """Read a text with each of these words as the last token: once, where keys and values can be kept, or in rows."""
    if isinstance(subject, LanguageModel):
        subject.read(words[:, None], watch, prefix=subject.read_prefix(ids.tolist(), rows=len(words)))
    else:
        subject.read(torch.cat((ids.expand(len(words), -1), words[:, None]), dim=1), watch)


def crossing(distances: Sequence[int], target: Tensor, nearest: float) -> float:
    """Return the distance at which a falling curve reaches a value, between tested ones by a straight line.

    Counted from the nearest distractor, which is at distance 1; inf if the curve stays above at all distances.

    Shapes:
        target: (len(distances),).
    """
    values: list[float] = target.tolist()
    for index, value in enumerate(values):
        if value >= nearest:
            continue
        if index == 0:
            return float(distances[0] - 1)
        before, gap = values[index - 1], distances[index] - distances[index - 1]
        return distances[index - 1] - 1 + gap * (before - nearest) / (before - value)
    return math.inf


def advantage(distances: Sequence[int], target: Tensor, other: Tensor) -> Advantage:
    """Return D, d, and the predicted and the measured crossing of each head.

    Formula: D = mean over tested distances m of target(m) - other(m); d = minus the least-squares slope of other over
        distance, up to the largest tested one; the nearest distractor wins beyond D / d tokens from it.

    Shapes:
        target: (L, H, len(distances)). other: (L, H, T).
    """
    words = _words(distances, target, other)
    near = other[..., : max(distances)]
    positions = torch.arange(near.shape[-1], dtype=torch.float64)
    centred = positions - positions.mean()
    steps = -(near * centred).sum(dim=-1) / centred.square().sum()
    beyond = torch.where(steps > 0, words / steps.clamp(min=1e-12), torch.inf)
    predicted = torch.where(words > 0, beyond, 0.0)
    measured = torch.tensor(
        [
            [crossing(distances, curve, float(nearest)) for curve, nearest in zip(*layer, strict=True)]
            for layer in zip(target, other[..., 0], strict=True)
        ],
        dtype=torch.float64,
    )
    return Advantage(words, steps, predicted, measured)


@PROBES.register("score-advantage")
@dataclass(frozen=True)
class ScoreAdvantage(MeasuredProbe):
    """Measure how far away attention finds a word, and its bound.

    A word that is asked for has the score advantage D over other words. Positions take d per token of distance. Then
    the nearest distractor has the higher score beyond D / d tokens. The bound motivates CoPE.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 3, https://arxiv.org/abs/2405.18719
    Formula: D = mean over m of s(word, m) - s(other, m); d = minus the slope of s(other, m) over m; predicted crossing
        D / d; measured crossing: the first m at which s(word, m) < s(other, 1), counted from the nearest distractor.
        Distance to the last token and to token 0 go together in one length, so the text is also made twice as long,
        and the word occurs two and four times. Intervals: bootstrap over strings.
    Differs from the paper: measured on any attention, whose scores need not fall along a straight line.

    Args:
        strings: Number of random token sequences.
        farthest: Largest tested distance; distances double from 2 up to it.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "score-advantage"
    caption: ClassVar[str] = (
        "Attention scores of a repeated word and of other words by distance, and where each head loses the word; do "
        "not conclude from the bound at which distance that happens."
    )
    small: ClassVar[Mapping[str, int]] = {"farthest": 32}

    strings: Annotated[int, Integer(1)] = 24
    farthest: Annotated[int, Integer(4)] = 64
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read random text with a repeated word; see ``Probe.run``."""
        distances = [2**power for power in range(1, self.farthest.bit_length()) if 2**power <= self.farthest]
        tokens = max(distances) + 16
        check_length(subject, 2 * tokens)
        if subject.vocabulary <= len(distances):  # a text has a word for each distance, and others between them
            raise UnsupportedModelError(
                f"{subject.facts()['model']} has {subject.vocabulary} token ids; score-advantage needs one for each "
                f"of its {len(distances)} distances, and another; give a smaller farthest, or a model with more"
            )
        with progress("reading random text") as report:
            target, other = score_curves(subject, distances, self.strings, tokens, self.seed, report)
        result = advantage(distances, target.mean(dim=0), other.mean(dim=0))
        heads: list[dict[str, Any]] = [
            {
                "layer": layer,
                "head": head,
                "D": float(result.words[layer, head]),
                "d": float(result.steps[layer, head]),
                "predicted": _finite(float(result.predicted[layer, head])),
                "measured": _finite(float(result.measured[layer, head])),
            }
            for layer in range(subject.n_layers)
            for head in range(subject.n_heads)
        ]
        best = max(range(len(heads)), key=lambda number: float(heads[number]["D"]))
        layer, head = divmod(best, subject.n_heads)
        chosen = sorted({distances[0], distances[len(distances) // 2], distances[-1]})
        once = (target[..., [distances.index(each) for each in chosen]], other)
        varied = {ONCE: {"tokens": tokens, "occurrences": 1, **_advantage_of(chosen, *once, layer, head)}}
        for name, (length, occurrences) in TEXTS.items():
            with progress(f"random text, {name}") as report:
                curves = score_curves(
                    subject, chosen, self.strings, length * tokens, self.seed, report, occurrences=occurrences
                )
            varied[name] = {"tokens": length * tokens, "occurrences": occurrences,
                            **_advantage_of(chosen, *curves, layer, head)}  # fmt: skip
        return Found(
            {
                **_shares(heads, float(distances[-1] - 1)),
                "strings": self.strings,
                "distances": distances,
                "example": {
                    "layer": layer, "head": head, "word": target.mean(dim=0)[layer, head].tolist(),
                    "other": other.mean(dim=0)[layer, head].tolist(),
                    "D": estimate(_words(distances, target, other)[:, layer, head]),
                },
                "varied": {"distances": chosen, "texts": varied},
                "by_head": heads,
            }
        )  # fmt: skip

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the scores of the head with the largest advantage, the crossings, and D in other texts."""
        summary = head["summary"]
        figure, (top, middle, bottom) = new_column(3)
        example, n = summary["example"], summary["strings"]
        name = f"layer {example['layer']}, head {example['head']}"
        others = example["other"]
        top.plot(range(1, 1 + len(others)), others, color=OTHER_COLORS[1], linewidth=0.7, label="other words")
        top.plot(summary["distances"], example["word"], marker="o", color=OTHER_COLORS[2], label="the same word")
        top.axhline(others[0], color="#999999", linestyle=":", label="nearest distractor")
        top.set_xscale("log")
        finish_axes(top, f"{name}, {n} strings", "distance in tokens", "attention score (nats)", columns=2)
        limit = summary["distances"][-1] * 4.0
        heads = [row for row in summary["by_head"] if row["D"] > 0]
        pairs = [[min(_of(row[key]), limit) + 1 for row in heads] for key in ("predicted", "measured")]
        middle.scatter(*pairs, s=10, color=OTHER_COLORS[3])
        middle.plot((1, limit), (1, limit), color="#999999", linestyle=":")
        middle.set_xscale("log")
        middle.set_yscale("log")
        title = f"{len(heads)} heads with an advantage, {n} strings\n(at the edge: never)"
        finish_axes(middle, title, "predicted crossing D / d, tokens", "measured, tokens", legend=False)
        texts = summary["varied"]["texts"]
        values = [text["D"] for text in texts.values()]
        draw_estimates(bottom, range(len(values)), values, across=True, color=OTHER_COLORS[1])
        bottom.set_yticks(range(len(values)), [name.replace(", ", ",\n") for name in texts], fontsize=9)
        bottom.set_ylim(len(values) - 0.5, -0.5)
        finish_axes(bottom, f"{name}, {n} strings, 95 % interval", "D (nats)", "", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return the heads with the largest advantage."""
        best = sorted(head["summary"]["by_head"], key=lambda row: -row["D"])[:10]
        rows = [
            (
                str(row["layer"]), str(row["head"]), f"{row['D']:.2f}", f"{row['d']:.2g}",
                *("none" if row[key] is None else f"{row[key]:.0f}" for key in ("predicted", "measured")),
            )
            for row in best
        ]  # fmt: skip
        n = head["summary"]["strings"]
        return [("layer", "head", f"D (nats), n = {n}", "d (nats per token)", "predicted crossing", "measured"), *rows]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return the numbers of the summary, and what other texts change."""
        texts = record.head["summary"]["varied"]["texts"]
        return [
            *super().lines(record),
            *(
                f"{name}: D {shown(text['D'])}; median of all heads {shown(text['median_D'])}; heads with an "
                f"advantage {shown(text['heads_with_advantage'])}"
                for name, text in texts.items()
            ),
        ]


def _words(distances: Sequence[int], target: Tensor, other: Tensor) -> Tensor:
    """Return D of each string and head, (strings, L, H)."""
    difference: Tensor = (target - other[..., torch.tensor(distances) - 1]).mean(dim=-1)
    return difference


def _advantage_of(
    distances: Sequence[int], target: Tensor, other: Tensor, layer: int, head: int
) -> dict[str, dict[str, Any]]:
    """Return D of one head, the median of all heads, and the share of heads with an advantage."""
    words = _words(distances, target, other)
    return {
        "D": estimate(words[:, layer, head]),
        "median_D": estimate(words, lambda means: means.flatten(-2).median(dim=-1).values),
        "heads_with_advantage": estimate(words, lambda means: (means > 0).double().mean(dim=(-2, -1))),
    }


def _shares(heads: Sequence[Mapping[str, Any]], longest: float) -> dict[str, Any]:
    """Return how many heads have an advantage, and how well the bound predicts where they lose the word."""
    finding = [row for row in heads if row["D"] > 0]
    within = [row for row in finding if _of(row["measured"]) <= longest]
    agree = [row for row in finding if (_of(row["predicted"]) <= longest) == (_of(row["measured"]) <= longest)]
    ratios = sorted(row["measured"] / row["predicted"] for row in within if row["predicted"] and row["measured"])
    return {
        "heads_with_advantage": len(finding),
        "heads": len(heads),
        "crossed_within_range": len(within),
        "agreement": len(agree) / len(finding) if finding else None,
        "median_measured_over_predicted": ratios[len(ratios) // 2] if ratios else None,
    }


def _finite(value: float) -> float | None:
    """Return a number for a record, with None for infinity."""
    return value if math.isfinite(value) else None


def _of(value: float | None) -> float:
    return math.inf if value is None else value
