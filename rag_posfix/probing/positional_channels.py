"""Probe of hidden channels that vary with the position for any text; it writes a profile for ``hidden_scaling``.

Depends on loaded models and hidden states only; of the methods, on the one that reads the profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, with_picture
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.record import ExperimentRecord, environment, write_record
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.parameters import Number, Whole
from rag_posfix.patching.forward_context import ForwardContext, active
from rag_posfix.probing.base import PROBES, Probe
from rag_posfix.probing.language_model import language_model
from rag_posfix.probing.subject import Subject
from rag_posfix.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "PositionalChannel",
    "PositionalChannelsRecord",
    "PositionalDimensions",
    "mean_hidden_states",
    "probe_positional_channels",
    "rank_channels",
]

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
        strings: Strings of random tokens to read.
        tokens: Tokens of each string.
        top: Candidates to keep.
        factor: The factor that the profile asks ``hidden_scaling`` for.
        seed: Of the random tokens.
        engine: The model; loaded by ``settings`` if None.
        settings: Read from the environment if None.
        out: Folder for the profile; None writes nothing.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        ConfigError: a number is out of range, or the model or a setting is wrong.
        UnsupportedModelError: no channel of the model follows the position.
    """
    create("hidden_scaling", {"factor": factor})  # an error in the factor is told before the work
    if engine is None:
        with progress("loading the model"):
            from rag_posfix.pipeline.build import build_engine

            engine = build_engine(settings or Settings())
    with progress("reading random text") as report:
        means = mean_hidden_states(engine.loaded, strings, tokens, seed, report)
    found = rank_channels(means, top)
    if not found:
        raise UnsupportedModelError(
            f"no hidden channel of {engine.model_id} follows the position in more than a quarter of its layers; "
            "hidden_scaling has nothing to scale there; try more --strings or --tokens"
        )
    layers = default_layers(engine.loaded.spec.shape.n_layers)
    profile = {
        "channel": found[0].channel,
        "factor": factor,
        "layers": [layers.start, layers.stop - 1],
        "candidates": [
            {"channel": one.channel, "layers": list(one.layers), "roughness": one.roughness} for one in found
        ],
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "settings": {"strings": strings, "tokens": tokens, "seed": seed},
        "environment": environment(),
    }
    record = PositionalChannelsRecord(profile)
    if out is None:
        return record
    return replace(record, files={"profile": write_record(out, "positional-dimensions", profile)})


@PROBES.register("positional-dimensions")
@dataclass(frozen=True)
class PositionalDimensions(Probe):
    """Find the hidden channel that varies most smoothly with the position, and write a profile for hidden_scaling.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536
    Formula: see ``rank_channels``.

    Args:
        strings: Number of random token sequences.
        tokens: Tokens per sequence.
        top: Number of candidate channels to report.
        factor: Scaling factor of hidden_scaling that the profile contains.
        seed: Seed of the random tokens.
    """

    name: ClassVar[str] = "positional-dimensions"
    source: ClassVar[str] = (
        "Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536"
    )

    strings: Annotated[int, Whole(1)] = 100
    tokens: Annotated[int, Whole(FEWEST_TOKENS)] = 1000
    top: Annotated[int, Whole(1)] = 10
    factor: Annotated[float, Number(-1e9, 1e9)] = 0.0
    seed: int = 0

    def check(self) -> None:
        """Check the factor, whose range is that of hidden_scaling."""
        create("hidden_scaling", {"factor": self.factor})

    def run(self, subject: Subject, *, out: Path | None = None, progress: Progress = silent) -> ExperimentRecord:
        """Return the record of ``probe_positional_channels``, with a picture."""
        engine = language_model(subject, self.name).engine
        found = probe_positional_channels(
            strings=self.strings, tokens=self.tokens, top=self.top, factor=self.factor, seed=self.seed, engine=engine,
            out=out, progress=progress,
        )  # fmt: skip
        return with_picture(found, self.draw)

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return a bar per candidate: the roughness of its curve."""
        figure, axes = new_axes((7.2, 3.2))
        found = head["candidates"]
        axes.bar(range(len(found)), [one["roughness"] for one in found], color=OTHER_COLORS[1])
        axes.set_xticks(range(len(found)), [str(one["channel"]) for one in found], fontsize=8)
        axes.set_yscale("log")
        axes.set_xlabel("hidden channel")
        axes.set_ylabel("roughness")
        axes.set_title(f"{head['model']}: channels that follow the position", fontsize=10, loc="left")
        return figure

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per candidate."""
        rows = [
            (str(one["channel"]), str(len(one["layers"])), f"{one['roughness']:.3g}") for one in head["candidates"]
        ]
        return [("channel", "layers with a monotonic trend", "roughness"), *rows]

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return how the profile is used."""
        path = record.files["profile"]
        return [f"profile: {path}", f"to use it: --mitigation hidden_scaling:profile={path}"]


@torch.inference_mode()
def mean_hidden_states(
    loaded: LoadedModel,
    n_strings: int,
    n_tokens: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Return what attention reads in each layer at each position, averaged over strings of random tokens.

    Cost: one forward pass per string; memory for layers x tokens x hidden channels in float32.

    Args:
        loaded: The model.
        n_strings: How many strings.
        n_tokens: Tokens of each.
        seed: Of the random tokens.
        progress: Called with strings done and strings in all.

    Shapes:
        returns: (L, T, hidden) float32, on the CPU.

    Raises:
        ConfigError: there are no strings, or they are too short or longer than the model's context.
    """
    longest = loaded.spec.shape.context_window
    if n_strings < 1 or not FEWEST_TOKENS <= n_tokens <= longest:
        raise ConfigError(
            f"{n_strings} strings of {n_tokens} tokens cannot be probed; it takes at least 1 string of "
            f"{FEWEST_TOKENS} to {longest} tokens, the context of this model"
        )
    shape = loaded.spec.shape
    total = torch.zeros(shape.n_layers, n_tokens, shape.hidden_size)

    def add(layer: int, states: Tensor) -> None:
        total[layer] += states[0].float().cpu()

    generator = torch.Generator().manual_seed(seed)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    for done in range(n_strings):
        ids = torch.randint(0, vocabulary, (1, n_tokens), generator=generator).to(loaded.device)
        with active(ForwardContext(on_hidden_states=add)):
            loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        if progress is not None:
            progress(done + 1, n_strings)
    return total / n_strings


def rank_channels(means: Tensor, top: int = 10) -> list[PositionalChannel]:
    """Return the channels that follow the position in more than a quarter of the layers, the smoothest first.

    Source: Yu et al. (2024), Mitigate Position Bias via Scaling a Single Dimension, https://arxiv.org/abs/2406.02536
    Formula: per layer and channel, a cubic is fitted to the curve over the positions, the first three tenths left out;
        the curve is monotone where the cubic's slope keeps its sign. Roughness is the sum of squared second
        differences of the curve, smoothed over ten positions; the least over the monotone layers counts.
    Differs from the paper: smoothing is a moving average instead of a Savitzky-Golay filter; each curve is first
        divided by its standard deviation, so that a channel is not smooth by being small; the first layer is left
        out, as its attention reads embeddings. The choice among the smoothest by a task is left to the caller.

    Shapes:
        means: (L, T, hidden), as ``mean_hidden_states`` returns them.
    """
    n_layers, n_tokens, hidden_size = means.shape
    found: list[tuple[Tensor, Tensor]] = [_follows_position(layer[3 * n_tokens // 10 :]) for layer in means[1:]]
    if not found:
        return []
    monotone = torch.stack([one for one, _ in found])  # (L - 1, hidden)
    roughness = torch.stack([one for _, one in found]).masked_fill(~monotone, torch.inf)
    least = roughness.amin(dim=0)
    kept = [c for c in range(hidden_size) if int(monotone[:, c].sum()) > n_layers / 4]
    kept.sort(key=lambda c: float(least[c]))  # stable: channels alike stay in their own order
    return [
        PositionalChannel(c, tuple(1 + int(i) for i in monotone[:, c].nonzero()[:, 0]), float(least[c]))
        for c in kept[:top]
    ]


def _follows_position(curves: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each channel's curve is monotone, (hidden,) bool, and its roughness, (hidden,).

    Shapes:
        curves: (T, hidden).
    """
    curves = curves.double()
    at = torch.linspace(-1, 1, curves.shape[0], dtype=torch.float64)
    powers = torch.stack([at**power for power in range(4)], dim=1)  # (T, 4)
    cubic = torch.linalg.lstsq(powers, curves).solution  # (4, hidden)
    slope = cubic[1] + 2 * at[:, None] * cubic[2] + 3 * at[:, None] ** 2 * cubic[3]  # (T, hidden)
    monotone = (slope > 0).all(dim=0) | (slope < 0).all(dim=0)
    spread = curves.std(dim=0)
    even = curves / spread.where(spread > 0, 1.0)
    smoothed = even.unfold(0, WINDOW, 1).mean(dim=-1)  # (T - WINDOW + 1, hidden)
    return monotone & (spread > 0), smoothed.diff(n=2, dim=0).square().sum(dim=0)
