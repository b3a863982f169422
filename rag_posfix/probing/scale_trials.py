"""Trials of a scaled hidden channel on key-value retrieval: the choice of channel and factor, and its controls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rag_posfix.evaluation.record import counted
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.plan.plan import HiddenScale
from rag_posfix.probing.intervals import estimate
from rag_posfix.probing.prompts import KeyValuePrompt, retrieval_losses
from rag_posfix.probing.subject import Change, LanguageModel, Watch

FACTORS = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.5, 2.0)
RANDOM, NEAREST = 8, 32
"""Random channels of the null distribution, and from how many channels of nearest size they are drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaleTrials:
    """Retrieval losses of a model whose hidden channel is scaled, on the same prompts.

    Attributes:
        model: The model.
        prompts: The prompts.
        unchanged: The losses of the model as it is, (P,).
    """

    model: LanguageModel
    prompts: Sequence[KeyValuePrompt]
    unchanged: Tensor

    @classmethod
    def of(cls, model: LanguageModel, prompts: Sequence[KeyValuePrompt]) -> ScaleTrials:
        """Return the trials of a model on prompts, with the losses of the unchanged model."""
        return cls(model, prompts, retrieval_losses(model, prompts, lambda prompt: Change()))

    def losses(self, channel: int, factor: float) -> Tensor:
        """Return the loss of each prompt with a scaled channel, (P,)."""
        scale = HiddenScale(channel, factor, default_layers(self.model.n_layers))
        return retrieval_losses(
            self.model, self.prompts, lambda prompt: Change(hidden_scale=scale, prompt_length=len(prompt.ids))
        )

    def trial(self, channel: int | None, factor: float, losses: Tensor | None = None) -> dict[str, Any]:
        """Return channel, factor, loss, its paired change with the standard deviation over prompts, and by place.

        ``late_less_early`` is the change for gold pairs of the second half less that for those of the first: above 0
        favours the start (primacy), below 0 the end.
        """
        if losses is None:
            losses = self.unchanged if channel is None else self.losses(channel, factor)
        change, gold = losses - self.unchanged, torch.tensor([prompt.gold for prompt in self.prompts])
        late = gold >= (int(gold.max()) + 1) / 2
        halves = torch.stack((change * late, late.double(), change * ~late, (~late).double()), dim=1)
        return {
            "channel": channel,
            "factor": factor,
            "loss": float(losses.mean()),
            "change": estimate(change),
            "deviation": float(change.std()) if len(change) > 1 else 0.0,
            "late_less_early": estimate(halves, lambda m: m[..., 0] / m[..., 1] - m[..., 2] / m[..., 3]),
            "by_position": [float(losses[gold == place].mean()) for place in sorted(set(gold.tolist()))],
        }


def best_scale(
    trials: ScaleTrials,
    channels: Sequence[int],
    factors: Sequence[float] = FACTORS,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, float, list[dict[str, Any]]]:
    """Return the channel and the factor with the lowest retrieval loss over the gold positions, and all trials.

    Source: Yu et al. (2024), section 3: the channel with the lowest loss at factor 0, then the factor with the lowest
        loss for this channel.

    Args:
        factors: Factors to try, 0 among them.

    Returns:
        Channel, factor, and the trials (``ScaleTrials.trial``), the unchanged model first.
    """
    unchanged = trials.trial(None, 1.0)
    tried = [unchanged, *(trials.trial(channel, 0.0) for channel in counted(channels, progress))]
    best = min(tried[1:], key=lambda row: float(row["loss"]))["channel"]
    tried += [trials.trial(best, factor) for factor in counted(factors, progress) if factor != 0]
    channel_trials = [row for row in tried if row["channel"] == best]
    return best, float(min(channel_trials, key=lambda row: float(row["loss"]))["factor"]), tried


def random_channels(
    model: LanguageModel, prompts: Sequence[KeyValuePrompt], channel: int, left_out: Sequence[int], seed: int
) -> list[int]:
    """Return random channels whose size in the scaled layers is near that of a channel: the null distribution.

    Args:
        left_out: Channels that follow the position.
    """
    layers = default_layers(model.n_layers)
    squares = torch.zeros(model.width, dtype=torch.float64)

    def add(layer: int, states: Tensor) -> None:
        if layer in layers:
            squares.add_(states[0].double().square().mean(dim=0).cpu())

    for prompt in prompts[:4]:
        model.read(prompt.tensor, Watch(inputs=add))
    apart = (squares.clamp(min=1e-30).log() - squares[channel].clamp(min=1e-30).log()).abs()
    apart[[channel, *left_out]] = torch.inf
    nearest = apart.argsort()[: min(NEAREST, int(apart.isfinite().sum()))].tolist()
    return sorted(random.Random(seed).sample(nearest, min(RANDOM, len(nearest))))


def held_out(
    trials: ScaleTrials,
    channel: int,
    factor: float,
    candidates: Sequence[int],
    controls: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return, on prompts that nothing was chosen on, dose and response of the chosen channel and its factor elsewhere.

    ``monotony``: the rank correlation over the candidates, smoothest first, of roughness and change, and the mean
    change of candidates less that of random channels. ``causality``: the change of the chosen channel less the mean of
    random ones, and how many of them are as low. ``scaling``: the factor with the lowest loss here, and the loss of
    the chosen factor less that of factor 0.
    """
    settings = [(channel, dose) for dose in sorted({*FACTORS, factor})]
    settings += [(other, factor) for other in (*candidates, *controls) if other != channel]
    losses = {setting: trials.losses(*setting) for setting in counted(settings, progress)}
    rows = {setting: trials.trial(*setting, values) for setting, values in losses.items()}
    changes = {other: losses[other, factor] - trials.unchanged for other in (channel, *candidates, *controls)}
    ranked = torch.stack([changes[other].mean() for other in candidates]).argsort().argsort().double()
    null = torch.stack([changes[other] for other in controls]).mean(dim=0)
    chosen = changes[channel]
    doses = [rows[channel, dose] for dose in sorted({*FACTORS, factor})]
    order = torch.arange(len(candidates), dtype=torch.float64)
    return {
        "prompts": len(trials.prompts),
        "unchanged": estimate(trials.unchanged),
        "doses": doses,
        "candidates": [rows[other, factor] for other in candidates],
        "random": [rows[other, factor] for other in controls],
        "monotony": {
            "rank_correlation": float(torch.corrcoef(torch.stack((order, ranked)))[0, 1]) if len(order) > 1 else None,
            "candidates_less_random": estimate(torch.stack([changes[c] for c in candidates]).mean(dim=0) - null),
        },
        "causality": {
            "chosen_less_random": estimate(chosen - null),
            "random_as_low": sum(float(changes[other].mean()) <= float(chosen.mean()) for other in controls),
        },
        "scaling": {
            "best_factor": min(doses, key=lambda row: float(row["loss"]))["factor"],
            "chosen_less_zero": estimate(chosen - (losses[channel, 0.0] - trials.unchanged)),
        },
    }
