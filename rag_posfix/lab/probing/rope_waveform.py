"""Probe of the waveform of a model's rotary encoding: distances at which like vectors attend to each other little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

from rag_posfix.attention.rope import search_factors, trough_depth, waveform
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.evaluation.figures import OTHER_COLORS, finish_axes, new_column
from rag_posfix.evaluation.record import ExperimentRecord, Progress
from rag_posfix.lab.encodings.rope import RotaryAngles
from rag_posfix.lab.probing.base import PROBES, Found, MeasuredProbe
from rag_posfix.lab.probing.subject import LanguageModel, SmallDecoder, Subject
from rag_posfix.parameters import Integer, Number
from rag_posfix.patching.attention_hook import LayerRotation
from rag_posfix.plan.plan import Capability

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TROUGHS = 8


def own_waveform(subject: Subject, distances: Tensor, factor: float = 1.0) -> tuple[Tensor, int, float]:
    """Return what a model's own rotation makes of two vectors of ones at distances, its rotated channels and its base.

    Formula: (R_m 1) . 1 / sqrt(d), d the rotated channels of a head. With plain RoPE that is ``waveform``. Models that
        scale their frequencies (Llama 3, YaRN) have another one.

    Args:
        factor: Of the base by which vectors are rotated, as ``multi_base`` applies it; not of the returned one.

    Shapes:
        distances: (M,). returns: (M,) float64.
    """
    if isinstance(subject, LanguageModel):
        return _of_language_model(subject, distances, factor)
    encoding = subject.decoder.encoding if isinstance(subject, SmallDecoder) else None
    if not isinstance(subject, SmallDecoder) or encoding is None or encoding.name != "rope":
        label = "the model" if encoding is None else f"a decoder with {encoding.label}"
        raise UnsupportedModelError(f"{label} does not rotate queries and keys; rope-waveform needs RoPE")
    ones = torch.ones(1, 1, int(distances.max()) + 1, subject.decoder.shape.head_dim)
    base = float(encoding.parameters["base"])
    _, turned = RotaryAngles(**{**encoding.parameters, "base": base * factor}).rotate(ones, ones)
    total = turned[0, 0].double().sum(dim=-1)[distances] / ones.shape[-1] ** 0.5
    return total, ones.shape[-1], base


def _of_language_model(subject: LanguageModel, distances: Tensor, factor: float) -> tuple[Tensor, int, float]:
    spec = subject.engine.loaded.spec
    rope = getattr(subject.engine.loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    if Capability.ANGLES not in spec.shape.capabilities or "rope_theta" not in rope:
        raise UnsupportedModelError(
            f"{subject.engine.model_id} does not rotate queries and keys by one base in all layers; rope-waveform "
            "needs such a model"
        )
    ones = torch.ones(1, 1, distances.shape[0], spec.shape.head_dim, device=subject.engine.loaded.device)
    positions = distances.float().to(ones.device)[None]
    rotation = LayerRotation(spec, base_factor=None if factor == 1.0 else factor)
    turned = rotation(ones, positions)[0, 0].double().cpu()  # (M, D)
    rotated = 2 * rotation.phases(positions[:, :1]).shape[-1]
    return turned[:, :rotated].sum(dim=-1) / rotated**0.5, rotated, float(rope["rope_theta"])


def deepest_troughs(wave: Tensor, limit: int = MOST_TROUGHS) -> list[int]:
    """Return the places of the lowest local minima of a waveform, the lowest first.

    Shapes:
        wave: (M,).
    """
    inner = wave[1:-1]
    minima = ((inner < wave[:-2]) & (inner <= wave[2:])).nonzero()[:, 0] + 1
    return [int(distance) for distance in minima[wave[minima].argsort()][:limit]]


@PROBES.register("rope-waveform")
@dataclass(frozen=True)
class RopeWaveform(MeasuredProbe):
    """Draw the rotary waveform; find bases that cover its troughs.

    A token at the distance of a trough gets less attention than one before and behind it. Reading with several bases
    covers the troughs of one by the peaks of another.

    Source: Chen et al. (2024), Fortify the Shortest Stave in Attention (Attention Buckets), section 3,
        https://arxiv.org/abs/2312.04455
    Formula: W_B(m) = (2 / sqrt(d)) sum_i cos(m B^(-2i/d)). The search is ``attention.rope.search_factors``: from the
        model's base, add the base whose envelope max_B W_B(m) has the highest mean over its lowest tenth. Waves are
        those of the model's own rotation: frequencies that Llama 3 or YaRN scale are not B^(-2i/d), and ``multi_base``
        multiplies them as they are.
    Differs from the paper: bases are multiples of the model's own, not of 10000; what is optimised is the mean of the
        lowest tenth.

    Args:
        context: Number of distances.
        bases: Number of bases to find, the model's own included.
        highest: Largest factor of the base that is tried.
        candidates: Number of factors that are tried, evenly from 1 to ``highest``.
    """

    name: ClassVar[str] = "rope-waveform"
    caption: ClassVar[str] = (
        "What the rotary encoding alone makes of two equal vectors by distance, with one base and with several; do "
        "not conclude that a head attends least at a trough, as its vectors are not equal."
    )

    context: Annotated[int, Integer(8)] = 2048
    bases: Annotated[int, Integer(1)] = 7
    highest: Annotated[float, Number(1, 100, exclusive_min=True)] = 3.0
    candidates: Annotated[int, Integer(2)] = 41

    def measure(self, subject: Subject, progress: Progress) -> Found:
        """Compute the model's waveform and search bases; see ``Probe.run``."""
        distances = torch.arange(self.context)
        wave, channels, base = own_waveform(subject, distances)
        closed = waveform(channels, base, distances)
        tried = torch.linspace(1, self.highest, self.candidates).tolist()

        @cache
        def wave_of(factor: float) -> Tensor:
            return own_waveform(subject, distances, factor)[0]

        with progress("searching bases"):
            factors = search_factors(channels, base, tried, self.bases, self.context, wave_of)
        envelope, depths = wave, [trough_depth(wave)]
        for factor in factors[1:]:
            envelope = torch.maximum(envelope, wave_of(factor))
            depths.append(trough_depth(envelope))
        summary = {
            "base": base,
            "rotated_channels": channels,
            "difference_from_closed_form": float((wave - closed).abs().max()),
            "troughs": [{"distance": distance, "value": float(wave[distance])} for distance in deepest_troughs(wave)],
            "factors": list(factors),
            "bases": [base * factor for factor in factors],
            "trough_depth": depths,
            "waves": {"own": wave.tolist(), "envelope": envelope.tolist()},
        }
        pairs = zip(wave.tolist(), envelope.tolist(), strict=True)
        return Found(summary, [{"distance": m, "own": a, "envelope": b} for m, (a, b) in enumerate(pairs)])

    def draw(self, head: Mapping[str, Any]) -> Figure:
        """Return the waveform with its troughs and the envelope of the bases, and the depth by number of bases."""
        summary = head["summary"]
        figure, (top, bottom) = new_column(2)
        base, count = summary["base"], len(summary["factors"])
        top.plot(summary["waves"]["own"], color=OTHER_COLORS[1], linewidth=0.9, label=f"base {base:,.0f}")
        top.plot(
            summary["waves"]["envelope"], color=OTHER_COLORS[2], linewidth=0.9, label=f"envelope of {count} bases"
        )
        troughs = summary["troughs"]
        values = [trough["value"] for trough in troughs]
        top.plot([trough["distance"] for trough in troughs], values, "v", color="#b3382c", label="deepest troughs")
        title = f"waveform of RoPE, base {base:,.0f} (exact, no sampling)"
        finish_axes(top, title, "distance in tokens", "W(m)", columns=2)
        bottom.plot(range(1, count + 1), summary["trough_depth"], marker="o", color=OTHER_COLORS[2])
        finish_axes(
            bottom, "how well troughs are covered", "number of bases", "W, mean of the lowest tenth", legend=False
        )
        return figure

    def lines(self, record: ExperimentRecord) -> Sequence[str]:
        """Return what the waveform means for prompts, and the method that reads with the bases."""
        summary = record.head["summary"]
        depths, factors = summary["trough_depth"], ",".join(f"{factor:g}" for factor in summary["factors"])
        found = [f"{trough['distance']} (W = {trough['value']:.3f})" for trough in summary["troughs"][:3]]
        where = f"distances of {', '.join(found)} tokens" if found else "no distance"
        return [
            *super().lines(record),
            f"tokens get less attention than their neighbours at {where}",
            f"{len(depths)} bases lift the mean of the lowest tenth of W from {depths[0]:.3f} to {depths[-1]:.3f}",
            f"to read with these bases: --mitigation 'multi_base:factors=[{factors}]'",
        ]

    def table(self, head: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Return a row per base, in the order of the search."""
        summary = head["summary"]
        rows = [
            (f"{factor:g}", f"{base:g}", f"{depth:.3f}")
            for factor, base, depth in zip(summary["factors"], summary["bases"], summary["trough_depth"], strict=True)
        ]
        return [("factor", "base", "mean of the lowest tenth, with the bases above"), *rows]
