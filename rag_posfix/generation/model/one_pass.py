"""A prompt and its answer in one forward pass: what decoding computes token by token, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError, PlanConflictError
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, position_ids, run_model
from rag_posfix.patching.forward_context import Overrides, active, current
from rag_posfix.plan.plan import MaskFunction

__all__ = ["forward_with_answer", "mask_with_answer", "recompute_layers"]


def forward_with_answer(
    loaded: LoadedModel, prompt: Sequence[int], positions: Tensor, overrides: Overrides, answer: Sequence[int]
) -> Tensor:
    """Return the logits of each token of an answer after the prompt and the tokens before it.

    One pass without a cache, so that gradients flow. Positions of the answer are those of decoding
    (``SequenceBatch.next_positions``), and its tokens see all before them, as generated ones do.

    Args:
        loaded: The model.
        prompt: The tokens of a resolved row.
        positions: Their positions.
        overrides: What the row changes in the model.
        answer: The tokens of the answer.

    Shapes:
        positions: (1, T) float32.
        returns: (len(answer), V), in the model's dtype.

    Raises:
        PlanConflictError: the row decides something at the end of the prompt, or its attention has no gradient.
    """
    _check(overrides)
    device = loaded.device
    batch = SequenceBatch(loaded, None, torch.zeros((1, 0), device=device), overrides=overrides)
    batch.append(positions.to(device))
    context = batch.append(batch.next_positions(len(answer)))
    mask = overrides.mask
    if mask is not None:
        overrides = replace(overrides, mask=mask_with_answer(mask, len(prompt)))
    ids = torch.tensor([[*prompt, *answer]], device=device)
    whole = torch.equal(positions.round(), positions)
    logits = run_model(
        loaded, replace(context, overrides=overrides), None, ids, position_ids(batch.positions, whole), len(answer) + 1
    )
    return logits[0, :-1]


def mask_with_answer(mask: MaskFunction, n_prompt: int) -> MaskFunction:
    """Return the mask of a prompt that tokens follow: they see everything before them, as ``MaskFunction`` says."""

    def extended(query: Tensor, key: Tensor) -> Tensor:
        last = n_prompt - 1
        prompt = mask(query.clamp(max=last), key.clamp(max=last)) & (key < n_prompt)
        return torch.where(query < n_prompt, prompt, key <= query)

    return extended


def recompute_layers(model: Any) -> None:
    """Let a model that trains keep the inputs of its layers alone, and compute the layers again for the gradient.

    Args:
        model: With the attention hook. It takes effect in training mode.

    Raises:
        ConfigError: the model cannot do it.
    """
    options = {"use_reentrant": False, "context_fn": _checkpoint_contexts}
    # transformers before 5.20 has the second name alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable(options)
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} cannot recompute its layers; leave out --checkpointing") from error


def _checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed layer and of its recomputation, for ``torch.utils.checkpoint``.

    Layers are recomputed in the backward pass, which may run in another thread: the forward context is taken along.
    """
    found = current()
    return nullcontext(), nullcontext() if found is None else active(found)


def _check(overrides: Overrides) -> None:
    if overrides.head_scale is not None or overrides.hidden_scale is not None:
        raise PlanConflictError(
            "a plan that scales heads or a hidden channel for the newest token has no training forward; train under "
            "none, parallel_windows, set_prompting or parallel_encoding"
        )
    if overrides.attend is not None and not overrides.attend.differentiable:
        raise PlanConflictError(
            f"{type(overrides.attend).__name__} has no gradient; train under none, parallel_windows, set_prompting or "
            "parallel_encoding"
        )
