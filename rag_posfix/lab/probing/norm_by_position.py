"""Probe of the attention output's variance by position, which carries the position where nothing else encodes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.encodings import Decoder, DecoderShape, create_encoding
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe, jackknife, shown
from rag_posfix.lab.probing.subject import SmallDecoder, Subject, Watch, check_length, random_strings
from rag_posfix.parameters import Integer, Number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOCABULARY = 512
LAYERS = 4
SEEDS = 3
PAPER_DEVIATION = 0.02
"""Standard deviation of the paper's random weights, at which scores are near 0 and attention near uniform."""


@dataclass(frozen=True, slots=True, eq=False)
class NormCurves:
    """Attention by layer and position, over strings of random tokens.

    Shapes:
        variance: (L, T) over strings, averaged over the channels of all heads.
        norms: (strings, L, T) of the output.
        slope_ci95: Interval of the slope in the first layer (``log_slope``, jackknife over strings).
        entropy: (L, T) of the attention probabilities in nats, averaged over heads and strings; None if not requested.
    """

    variance: Tensor
    norms: Tensor
    slope_ci95: list[float]
    entropy: Tensor | None = None


def norm_curves(
    subject: Subject,
    strings: int,
    tokens: int,
    seed: int = 0,
    *,
    entropy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> NormCurves:
    """Return how attention's output and entropy vary with the position on random text (``NormCurves``).

    Args:
        strings: Number of strings, 3 or more.
    """
    shape = (subject.n_layers, tokens)
    entropies = torch.zeros(shape, dtype=torch.float64)
    norms = torch.zeros(strings, *shape, dtype=torch.float64)
    sums: dict[int, Tensor] = {}
    squares: dict[int, Tensor] = {}
    first_layer: list[Tensor] = []
    string_index = [0]

    def attended(layer: int, out: Tensor) -> None:
        flat = out[0].transpose(0, 1).flatten(1).double().cpu()  # (T, H D)
        sums[layer] = sums.get(layer, 0) + flat
        squares[layer] = squares.get(layer, 0) + flat.square()
        norms[string_index[0], layer] = flat.norm(dim=-1)
        if layer == 0:
            first_layer.append(flat.float())

    def weights(layer: int, probabilities: Tensor) -> None:
        entropies[layer] += torch.special.entr(probabilities[0].double()).sum(dim=-1).mean(dim=0).cpu() / strings

    watch = Watch(attended=attended, weights=weights if entropy else None)
    for number, ids in enumerate(random_strings(subject, strings, tokens, seed, progress)):
        string_index[0] = number
        subject.read(ids, watch)
    variance = [_variance(sums[layer], squares[layer], strings) for layer in sorted(sums)]
    without = [
        log_slope(_variance(sums[0] - flat, squares[0] - flat.double().square(), strings - 1)) for flat in first_layer
    ]
    interval = jackknife(log_slope(variance[0]), torch.tensor(without))
    return NormCurves(torch.stack(variance), norms, interval, entropies if entropy else None)


def _variance(total: Tensor, squares: Tensor, count: int) -> Tensor:
    """Return the variance of ``count`` values by their sum and sum of squares, averaged over channels, (T,)."""
    variance: Tensor = (squares - total.square() / count).mean(dim=-1) / (count - 1)
    return variance


def log_slope(curve: Tensor, skip: int = 4) -> float:
    """Return the least-squares slope of log(curve) over log(t), t counted from 1; -1 is the law sigma^2 / t.

    Shapes:
        curve: (T,), above 0. The first ``skip`` places are left out.
    """
    log_positions = torch.arange(1, curve.shape[0] + 1, dtype=torch.float64)[skip:].log()
    values = curve.double()[skip:].log()
    centred = log_positions - log_positions.mean()
    return float((centred * (values - values.mean())).sum() / centred.square().sum())


def resolution(norm: Tensor, spread: Tensor) -> list[int]:
    """Return, for each length, how many positions the norm tells apart.

    Formula: the first position counts; then each next position p whose mean norm differs from that of the last counted
        one, q, by at least s_p + s_q, the standard deviations of both.

    Shapes:
        norm, spread: (T,).
    """
    counted, last, counts = 1, 0, [1]
    for position in range(1, norm.shape[0]):
        if abs(float(norm[position] - norm[last])) >= float(spread[position] + spread[last]):
            counted, last = counted + 1, position
        counts.append(counted)
    return counts


@PROBES.register("norm-by-position")
@dataclass(frozen=True)
class NormByPosition(MeasuredProbe):
    """Measure how the variance of attention falls with the position.

    Without a position encoding the causal mask makes a token at place t the mean of about t values, so that the
    variance of attention's output tells the position. The law needs scores near 0; where scores differ, the output
    follows the query, and its variance has a floor.

    Source: Chi et al. (2023), Latent Positional Information is in the Self-Attention Variance of Transformer Language
        Models Without Positional Embeddings, section 3, https://arxiv.org/abs/2305.13571. Scale: Wang et al. (2024),
        https://arxiv.org/abs/2404.12224
    Formula: var_t = mean over channels of the variance over strings of sum_j a_tj v_j; the law is var_t = sigma^2 / t,
        a slope of -1 of log var_t over log t. Resolution: number of positions whose mean norms differ by at least the
        sum of their standard deviations (``resolution``). Entropy: -sum_j a_tj log a_tj. Intervals: jackknife over
        strings; untrained decoders have three seeds.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        scale: Factor of all scores of the NoPE decoder with a scale.
        seed: Seed of the tokens; first of three seeds of the weights.
    """

    name: ClassVar[str] = "norm-by-position"
    caption: ClassVar[str] = (
        "Variance and entropy of the first layer's attention by position, and how many positions its norm tells "
        "apart; do not conclude that a model uses what its norm tells."
    )
    small: ClassVar[Mapping[str, int]] = {"tokens": 128}

    strings: Annotated[int, Integer(3)] = 24
    tokens: Annotated[int, Integer(16)] = 256
    scale: Annotated[float, Number(0.01, 100)] = 3.0
    seed: int = 0

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Measure the model and decoders with random weights; see ``Probe.run``."""
        check_length(subject, self.tokens, 16)
        models = {}
        with progress("reading random text") as report:
            model_curves = norm_curves(subject, self.strings, self.tokens, self.seed, progress=report)
        models[str(subject.facts()["model"])] = self._summarize([model_curves])
        for label, (encoding, parameters, deviation) in self._decoders().items():
            runs = []
            for seed in range(self.seed, self.seed + SEEDS):
                with progress(f"untrained decoder: {label}, seed {seed}") as report:
                    decoder = random_decoder(encoding, parameters, seed, deviation)
                    runs.append(norm_curves(decoder, self.strings, self.tokens, seed, entropy=True, progress=report))
            models[f"untrained {label}"] = self._summarize(runs)
        return Found(
            {"tokens": self.tokens, "strings": self.strings, "at": self._sampled_positions(), "models": models}
        )

    def _decoders(self) -> dict[str, tuple[str, dict[str, Any], float | None]]:
        """Return encoding, parameters and deviation of the weights of the decoders beside the model."""
        return {
            f"nope, weights {PAPER_DEVIATION}": ("nope", {}, PAPER_DEVIATION),
            "nope": ("nope", {}, None),
            f"nope, scale {self.scale:g}": ("nope", {"scale": self.scale}, None),
            "rope": ("rope", {}, None),
            "alibi": ("alibi", {}, None),
        }

    def _sampled_positions(self) -> list[int]:
        """Return the positions of the record, from 1, evenly on a logarithmic scale."""
        count = 24
        return sorted({round(math.exp(math.log(self.tokens) * step / (count - 1))) for step in range(count)})

    def _summarize(self, runs: Sequence[NormCurves]) -> dict[str, Any]:
        """Return the curves of the first run, and the slope and the resolution of each seed."""
        curves, positions = runs[0], torch.tensor(self._sampled_positions()) - 1
        apart = [resolution(run.norms[:, 0].mean(dim=0), run.norms[:, 0].std(dim=0)) for run in runs]
        return {
            "slopes": [log_slope(layer) for layer in curves.variance],
            "slope": {"value": log_slope(curves.variance[0]), "ci95": curves.slope_ci95, "n": self.strings},
            "slope_by_seed": [log_slope(run.variance[0]) for run in runs],
            "variance": [layer[positions].tolist() for layer in curves.variance],
            "resolution": [apart[0][position] for position in positions.tolist()],
            "resolution_by_seed": [counts[-1] for counts in apart],
            "entropy": None if curves.entropy is None else curves.entropy[0][positions].tolist(),
        }

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the variance, the resolution and the entropy of the first layer by position."""
        summary = head["summary"]
        figure, (top, middle, bottom) = new_column(3, 3.3)
        positions = summary["at"]
        for number, (label, model) in enumerate(summary["models"].items()):
            style = {"color": OTHER_COLORS[number], "label": label}
            first = model["variance"][0]
            top.plot(positions, [value / first[0] for value in first], **style)
            middle.plot(positions, model["resolution"], **style)
            if model["entropy"] is not None:
                bottom.plot(positions, model["entropy"], **style)
        top.plot(positions, [1 / t for t in positions], color="#000000", linestyle=":", label="1 / t")
        bottom.plot(
            positions, [math.log(t) for t in positions], color="#000000", linestyle=":", label="log t (uniform)"
        )
        for axes in (top, middle, bottom):
            axes.set_xscale("log")
        top.set_yscale("log")
        n, x = summary["strings"], "position, from 1"
        finish_axes(top, f"variance of attention's output, first layer, n = {n}", x, "relative to the first")
        finish_axes(middle, f"positions that the norm tells apart, {n} strings", x, "positions", legend=False)
        finish_axes(bottom, f"entropy of attention, first layer, n = {n}", x, "nats", legend=False)
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per model."""
        rows = [
            (
                label,
                shown(model["slope"]),
                ", ".join(f"{slope:.2f}" for slope in model["slope_by_seed"]),
                f"{model['slopes'][-1]:.2f}",
                ", ".join(map(str, model["resolution_by_seed"])),
                "" if model["entropy"] is None else f"{model['entropy'][-1]:.2f}",
            )
            for label, model in head["summary"]["models"].items()
        ]
        n = head["summary"]["strings"]
        return [
            (
                "model", f"slope, first layer, n = {n}", "by seed of the weights", "last layer",
                "positions told apart, by seed", "entropy at the end",
            ),
            *rows,
        ]  # fmt: skip


def random_decoder(
    encoding: str, parameters: Mapping[str, Any], seed: int, deviation: float | None = None
) -> SmallDecoder:
    """Return a small decoder with random weights; the same weights for the same seed, whatever the encoding.

    Args:
        deviation: Standard deviation of the weights of all linear layers, whose biases are then 0; None leaves
            torch's own.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = Decoder(create_encoding(encoding, parameters), DecoderShape(VOCABULARY, layers=LAYERS))
        for module in decoder.modules():
            if deviation is not None and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=deviation)
                nn.init.zeros_(module.bias)
    return SmallDecoder(decoder.eval(), f"untrained {encoding}")
