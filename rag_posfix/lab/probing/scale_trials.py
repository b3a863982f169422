"""Trials of a scaled hidden channel on key-value retrieval: the choice of channel and factor, and its controls."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.sequence_batch import GrowingCache, LoadedModel, SequenceBatch, forward_batches
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.subject import KeyValuePrompt, LanguageModel, States, Watch, after_context, answer_loss
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.patching.attention_hook import (
    ForwardContext,
    Observer,
    Overrides,
    active,
    channel_columns,
    layer_rotation,
)
from rag_posfix.patching.structure import decoder_of
from rag_posfix.plan.plan import HiddenScale

FACTORS = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.5, 2.0)
RANDOM, NEAREST = 8, 32
"""Random channels of the null distribution, and from how many channels of nearest size they are drawn."""

UNCHANGED = (0, 1.0)
ROWS = 8
"""Settings that are tried in one forward pass."""

Setting = tuple[int, float]
"""A channel and its factor."""


def _scale_cached_keys(loaded: LoadedModel, cache: GrowingCache, states: States, scale: HiddenScale) -> None:
    """Scale a channel in keys that were read without it; ``states`` is what attention read, (1, T, width) by layer.

    Formula: R W (x with x_p scaled by s) = R W x + R (s - 1) x_p W[:, p].
    """
    for layer in scale.layers:
        module, keys = decoder_of(loaded.model).layers[layer].self_attn, cache.layers[layer].keys
        shape, ranks = loaded.spec.shape, loaded.spec.ranks
        column = channel_columns(module, scale.channel, shape.n_heads, shape.n_kv_heads, ranks)[1]  # (Hkv, D)
        amount = (scale.factor - 1.0) * states[layer][:, None, :, scale.channel, None]  # (1, 1, T, 1)
        positions = torch.arange(keys.shape[2], device=keys.device)[None].float()
        keys.add_(layer_rotation(Overrides(), loaded.spec, module)(amount * column[None, :, None], positions))


@torch.inference_mode()
def scaled_attention(model: LanguageModel, ids: Tensor, scale: HiddenScale) -> Tensor:
    """Return the attention of the last token with a scaled channel, the mean over heads and the scaled layers.

    Shapes:
        ids: (1, T). returns: (T,) float32.
    """
    loaded, observer = model.engine.loaded.reading(ids.shape[1]), Observer(layers=frozenset(scale.layers))
    positions = torch.arange(ids.shape[1], device=loaded.device)[None]
    context = ForwardContext(
        Overrides(hidden_scale=scale), positions.float(), loaded.spec, prompt_length=ids.shape[1], observer=observer
    )
    with active(context):
        loaded.model(input_ids=ids.to(loaded.device), position_ids=positions, use_cache=False, logits_to_keep=1)
    mean = observer.mean()
    if mean is None:
        raise ConfigError(f"layers={scale.layers} must be layers of this model, which has {model.n_layers}")
    return mean[0].float().cpu()


def logits_after_prefix(
    model: LanguageModel, scales: Sequence[HiddenScale], prompt: KeyValuePrompt, prefix: GrowingCache, context: States
) -> list[Tensor]:
    """Return the logits of the answer's tokens with each scaled channel, (A, vocabulary) each.

    The method scales nothing in tokens before the prompt's last: they are read once, and the tokens from it on once
    per setting, on keys that are scaled afterwards. ``prefix`` and ``context`` are those of ``after_context``.
    """
    loaded, start, last = model.engine.loaded.reading(len(prompt.ids)), prefix.get_seq_length(), len(prompt.ids) - 1
    question: dict[int, Tensor] = {}
    model.read(prompt.tensor[:, start:last], Watch(inputs=question.__setitem__), prefix=prefix)
    states = {layer: torch.cat((context[layer], question[layer]), dim=1) for layer in scales[0].layers}
    tail, positions = prompt.with_answer[:, last:].to(loaded.device), torch.arange(last, device=loaded.device).float()

    def scaled(scale: HiddenScale) -> SequenceBatch:
        cache, overrides = prefix.copy(last), Overrides(hidden_scale=scale)
        _scale_cached_keys(loaded, cache, states, scale)
        return SequenceBatch(loaded, cache, positions[None], overrides=overrides, prompt_length=last + 1, length=last)

    rows: list[Tensor] = []
    for first in range(0, len(scales), ROWS):
        batches = [scaled(scale) for scale in scales[first : first + ROWS]]
        rows += forward_batches(batches, [tail] * len(batches), len(prompt.answer))
    return [row[0] for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class ScaleTrials:
    """Retrieval losses of a model whose hidden channel is scaled, on the same prompts.

    Attributes:
        model: The model.
        prompts: The prompts.
    """

    model: LanguageModel
    prompts: Sequence[KeyValuePrompt]

    @torch.inference_mode()
    def losses(
        self, settings: Sequence[Setting], progress: Callable[[int, int], None] | None = None
    ) -> dict[Setting, Tensor]:
        """Return the loss of each prompt with each setting, and of the unchanged model, (P,) each."""
        settings = list(dict.fromkeys((UNCHANGED, *settings)))
        layers = default_layers(self.model.n_layers)
        scales = [HiddenScale(channel, factor, layers) for channel, factor in settings]
        losses = []
        for prompt, prefix, context in after_context(self.model, self.prompts, progress):
            rows = logits_after_prefix(self.model, scales, prompt, prefix, context)
            losses.append(torch.stack([answer_loss(row, prompt) for row in rows]))
        return dict(zip(settings, torch.stack(losses, dim=1), strict=True))

    def trial(self, setting: Setting, losses: Mapping[Setting, Tensor]) -> dict[str, Any]:
        """Return channel, factor, loss, its paired change with the standard deviation over prompts, and by place.

        ``late_less_early`` is the change for gold pairs of the second half less that for those of the first: above 0
        favours the start (primacy), below 0 the end.
        """
        loss, gold = losses[setting], torch.tensor([prompt.gold for prompt in self.prompts])
        change, late = loss - losses[UNCHANGED], gold >= (int(gold.max()) + 1) / 2
        halves = torch.stack((change * late, late.double(), change * ~late, (~late).double()), dim=1)
        return {
            "channel": None if setting == UNCHANGED else setting[0],
            "factor": setting[1],
            "loss": float(loss.mean()),
            "change": estimate(change),
            "deviation": float(change.std()) if len(change) > 1 else 0.0,
            "late_less_early": estimate(halves, lambda m: m[..., 0] / m[..., 1] - m[..., 2] / m[..., 3]),
            "by_position": [float(loss[gold == place].mean()) for place in sorted(set(gold.tolist()))],
        }


def best_scale(
    trials: ScaleTrials,
    channels: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, float, list[dict[str, Any]]]:
    """Return the channel and the factor with the lowest retrieval loss over the gold positions, and all trials.

    Source: Yu et al. (2024), section 3: the channel with the lowest loss at factor 0, then the factor with the lowest
        loss for this channel.

    Returns:
        Channel, factor, and the trials (``ScaleTrials.trial``), the unchanged model first.
    """
    losses = trials.losses([(channel, 0.0) for channel in channels], progress)
    tried = [trials.trial(setting, losses) for setting in losses]
    best = min(tried[1:], key=lambda row: float(row["loss"]))["channel"]
    losses = trials.losses([(best, factor) for factor in FACTORS if factor != 0], progress)
    tried += [trials.trial(setting, losses) for setting in losses if setting != UNCHANGED]
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
    losses = trials.losses(settings, progress)
    rows = {setting: trials.trial(setting, losses) for setting in settings}
    changes = {other: losses[other, factor] - losses[UNCHANGED] for other in (channel, *candidates, *controls)}
    ranked = torch.stack([changes[other].mean() for other in candidates]).argsort().argsort().double()
    null = torch.stack([changes[other] for other in controls]).mean(dim=0)
    chosen = changes[channel]
    doses = [rows[channel, dose] for dose in sorted({*FACTORS, factor})]
    order = torch.arange(len(candidates), dtype=torch.float64)
    return {
        "prompts": len(trials.prompts),
        "unchanged": estimate(losses[UNCHANGED]),
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
            "chosen_less_zero": estimate(losses[channel, factor] - losses[channel, 0.0]),
        },
    }
