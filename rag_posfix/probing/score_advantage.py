"""Probe of the bound on how far away a word is found, by its score advantage and what positions give per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.evaluation.figures import OTHER_COLORS, new_row
from rag_posfix.evaluation.record import Progress
from rag_posfix.parameters import Integer
from rag_posfix.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.probing.prompts import check_length
from rag_posfix.probing.subject import Subject, Watch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = 1
"""The first token is no distractor: much attention goes to it whatever it is."""
SMALLEST = 1e-30


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
) -> tuple[Tensor, Tensor]:
    """Return the scores of the last token for its own word at distances, and for other words at all distances.

    The text is of random tokens; the last token's word occurs once before. Scores are log-probabilities of attention,
    less their mean over the other words of the same row: softmax leaves differences as they are.

    Shapes:
        returns: (L, H, len(distances)) and (L, H, tokens - 2), the other words at distance 1, 2, ..., float64.
    """
    shape = (subject.n_layers, subject.n_heads)
    target = torch.zeros(*shape, len(distances), dtype=torch.float64)
    other = torch.zeros(*shape, tokens - 1 - FIRST, dtype=torch.float64)
    counts = torch.zeros(tokens - 1 - FIRST, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for done in range(strings * len(distances)):
        index = done % len(distances)
        ids = torch.randint(0, subject.vocabulary - 1, (1, tokens), generator=generator)
        word = torch.randint(0, subject.vocabulary, (1,), generator=generator)
        ids[ids >= word] += 1  # the word is nowhere but where it is put
        ids[0, -1] = ids[0, -1 - distances[index]] = word[0]
        offset = distances[index] - 1
        is_other = torch.arange(tokens - 1 - FIRST) != offset
        counts += is_other

        def add(
            layer: int, weights: Tensor, index: int = index, offset: int = offset, is_other: Tensor = is_other
        ) -> None:
            row = weights[0, :, -1, FIRST:-1].double().cpu().clamp(min=SMALLEST).log().flip(-1)  # distance 1 first
            row = row - row[:, is_other].mean(dim=-1, keepdim=True)
            target[layer, :, index] += row[:, offset] / strings
            other[layer][:, is_other] += row[:, is_other]

        subject.read(ids, Watch(weights=add))
        if progress is not None:
            progress(done + 1, strings * len(distances))
    return target, other / counts.clamp(min=1)


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
    words = (target - other[..., torch.tensor(distances) - 1]).mean(dim=-1)
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
    """Measure how far away attention finds a word, against the bound by score advantage and slope of positions.

    A word that is asked for has the score advantage D over other words. Positions take d per token of distance. Then
    the nearest distractor has the higher score beyond D / d tokens. The bound motivates CoPE.

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 3, https://arxiv.org/abs/2405.18719
    Formula: D = mean over m of s(word, m) - s(other, m); d = minus the slope of s(other, m) over m; predicted crossing
        D / d; measured crossing: the first m at which s(word, m) < s(other, 1), counted from the nearest distractor.
    Differs from the paper: measured on any attention, whose scores need not fall along a straight line.

    Args:
        strings: Number of random token sequences per distance.
        farthest: Largest tested distance; distances double from 2 up to it.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "score-advantage"
    source: ClassVar[str] = (
        "Golovneva et al. (2024), Contextual Position Encoding: Learning to Count What's Important, "
        "https://arxiv.org/abs/2405.18719"
    )
    deviations: ClassVar[tuple[str, ...]] = ("Measured on any attention.",)

    strings: Annotated[int, Integer(1)] = 12
    farthest: Annotated[int, Integer(4)] = 256
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Read random text with a repeated word; see ``Probe.run``."""
        distances = [2**power for power in range(1, self.farthest.bit_length()) if 2**power <= self.farthest]
        tokens = max(distances) + 16
        check_length(subject, tokens)
        with progress("reading random text") as report:
            target, other = score_curves(subject, distances, self.strings, tokens, self.seed, report)
        result = advantage(distances, target, other)
        longest = float(distances[-1] - 1)
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
        finding = [row for row in heads if row["D"] > 0]
        within = [row for row in finding if _of(row["measured"]) <= longest]
        both = [row for row in within if row["predicted"] and row["measured"]]
        agree = [row for row in finding if (_of(row["predicted"]) <= longest) == (_of(row["measured"]) <= longest)]
        best = max(range(len(heads)), key=lambda number: float(heads[number]["D"]))
        layer, head = divmod(best, subject.n_heads)
        ratios = sorted(float(row["measured"]) / float(row["predicted"]) for row in both)
        return Found(
            {
                "heads_with_advantage": len(finding),
                "heads": len(heads),
                "crossed_within_range": len(within),
                "agreement": len(agree) / len(finding) if finding else None,
                "median_measured_over_predicted": ratios[len(ratios) // 2] if ratios else None,
                "distances": distances,
                "example": {
                    "layer": layer, "head": head, "word": target[layer, head].tolist(),
                    "other": other[layer, head].tolist(),
                },
                "by_head": heads,
            }
        )  # fmt: skip

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the scores of the head with the largest advantage, and predicted against measured crossings."""
        summary = head["summary"]
        figure, (left, right) = new_row(2, (11.0, 3.8))
        example = summary["example"]
        left.plot(
            range(1, 1 + len(example["other"])), example["other"], color=OTHER_COLORS[1], linewidth=0.7, label="others"
        )
        left.plot(summary["distances"], example["word"], marker="o", color=OTHER_COLORS[2], label="the same word")
        left.axhline(example["other"][0], color="#999999", linestyle=":", label="nearest distractor")
        left.set_xscale("log")
        left.set_xlabel("distance in tokens")
        left.set_ylabel("attention score (nats)")
        left.set_title(f"{head['model']}: layer {example['layer']}, head {example['head']}", fontsize=10, loc="left")
        left.legend(frameon=False, fontsize=8)
        limit = summary["distances"][-1] * 4.0
        heads = [row for row in summary["by_head"] if row["D"] > 0]
        pairs = [[min(_of(row[key]), limit) + 1 for row in heads] for key in ("predicted", "measured")]
        right.scatter(*pairs, s=10, color=OTHER_COLORS[3])
        right.plot((1, limit), (1, limit), color="#999999", linestyle=":")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xlabel("predicted crossing D / d, tokens")
        right.set_ylabel("measured crossing, tokens")
        right.set_title("heads with an advantage; never crossing at the edge", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return the heads with the largest advantage."""
        best = sorted(head["summary"]["by_head"], key=lambda row: -row["D"])[:10]
        rows = [
            (
                str(row["layer"]), str(row["head"]), f"{row['D']:.2f}", f"{row['d']:.4f}",
                *("none" if row[key] is None else f"{row[key]:.0f}" for key in ("predicted", "measured")),
            )
            for row in best
        ]  # fmt: skip
        return [("layer", "head", "D (nats)", "d (nats per token)", "predicted crossing", "measured"), *rows]


def _finite(value: float) -> float | None:
    """Return a number for a record, with None for infinity."""
    return value if math.isfinite(value) else None


def _of(value: float | None) -> float:
    return math.inf if value is None else value
