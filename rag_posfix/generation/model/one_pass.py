"""Prompts and their answers in one forward pass: what decoding computes token by token, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rag_posfix.attention.masks import block_diagonal_mask, causal_mask
from rag_posfix.errors import ConfigError, PlanConflictError
from rag_posfix.generation.model.sequence_batch import LoadedModel, SequenceBatch, position_ids, run_model
from rag_posfix.patching.attention_hook import Overrides, active, current
from rag_posfix.plan.plan import Capability, MaskFunction

TRAINABLE = "train under none, or under a method that changes only masks and positions"
"""What an error advises for a plan without a training forward."""


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredPrompt:
    """The tokens of a resolved row, their positions (1, T) float32, its overrides, and the tokens of its answer."""

    prompt: Sequence[int]
    positions: Tensor
    overrides: Overrides
    answer: Sequence[int]

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


def can_share_pass(loaded: LoadedModel, prompt: AnsweredPrompt) -> bool:
    """Return whether a prompt may be read in one pass with others: its plan changes only mask and positions.

    Models with sliding windows have masks of their own. Models with LongRoPE would read a prompt differently next to a
    longer one.
    """
    if loaded.spec.original_window is not None:
        return False
    return prompt.overrides.masks_only and {Capability.FULL_CACHE, Capability.ANGLES} <= loaded.spec.shape.capabilities


def forward_with_answers(loaded: LoadedModel, prompts: Sequence[AnsweredPrompt]) -> list[Tensor]:
    """Return the logits of each token of the answers after their prompts and the tokens before them.

    One pass without a cache, so that gradients flow. An answer has the positions of decoding
    (``SequenceBatch.next_positions``), and its tokens see all tokens before them, as in decoding. Several prompts are
    concatenated to one sequence, each with its own mask and positions; they do not see each other.

    Shapes:
        returns: (len(answer), V) for each, in the model's dtype.

    Cost: for several prompts a mask of T x T, T the tokens of all, and attention over it.

    Raises:
        PlanConflictError: a row decides something at the end of the prompt, its attention has no gradient, or it
            cannot share a pass with others.
    """
    for prompt in prompts:
        _check(prompt.overrides)
    if len(prompts) > 1 and not all(can_share_pass(loaded, prompt) for prompt in prompts):
        raise PlanConflictError(
            "a prompt whose plan changes more than mask and positions, or whose model has sliding windows or "
            "LongRoPE, cannot be packed with others; read it in a pass of its own"
        )
    loaded = loaded.reading(max(int(prompt.positions.max()) + 1 + len(prompt.answer) for prompt in prompts))
    rows = [_with_answer(loaded, prompt) for prompt in prompts]
    positions = torch.cat([row for _, row in rows], dim=1)
    context = SequenceBatch(loaded, None, positions[:, :0]).append(positions)
    context = replace(context, overrides=rows[0][0] if len(rows) == 1 else _pack_masks(rows))
    integer_positions = all(torch.equal(prompt.positions.round(), prompt.positions) for prompt in prompts)
    ids = torch.tensor(
        [[token for prompt in prompts for token in (*prompt.prompt, *prompt.answer)]], device=loaded.device
    )
    counts = [len(prompt.answer) + 1 for prompt in prompts]
    ends = accumulate(prompt.n_tokens for prompt in prompts)
    keep = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    logits = run_model(loaded, context, None, ids, position_ids(positions, integer_positions), keep.to(loaded.device))
    return [row[:-1] for row in torch.split(logits[0], counts)]


def mask_with_answer(mask: MaskFunction, n_prompt: int) -> MaskFunction:
    """Return the mask of a prompt with tokens after it, which see everything before them (``MaskFunction``)."""

    def extended(query: Tensor, key: Tensor) -> Tensor:
        last = n_prompt - 1
        prompt = mask(query.clamp(max=last), key.clamp(max=last)) & (key < n_prompt)
        return torch.where(query < n_prompt, prompt, causal_mask(query, key))

    return extended


def recompute_layers(model: Any) -> None:
    """Let a patched model in training mode keep only the inputs of its layers; they are recomputed for the gradient.

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
    context = current()
    return nullcontext(), nullcontext() if context is None else active(context)


def _with_answer(loaded: LoadedModel, prompt: AnsweredPrompt) -> tuple[Overrides, Tensor]:
    """Return what the row of a prompt changes, and its positions (1, T), the answer included in both."""
    overrides, device = prompt.overrides, loaded.device
    batch = SequenceBatch(loaded, None, torch.zeros((1, 0), device=device), overrides=overrides)
    batch.append(prompt.positions.to(device))
    batch.append(batch.next_positions(len(prompt.answer)))
    if overrides.mask is not None:
        overrides = replace(overrides, mask=mask_with_answer(overrides.mask, len(prompt.prompt)))
    return overrides, batch.positions


def _pack_masks(rows: Sequence[tuple[Overrides, Tensor]]) -> Overrides:
    masks = [overrides.mask or causal_mask for overrides, _ in rows]
    return Overrides(mask=block_diagonal_mask(masks, [positions.shape[1] for _, positions in rows]))


def _check(overrides: Overrides) -> None:
    if overrides.head_scale is not None or overrides.hidden_scale is not None:
        raise PlanConflictError(
            f"a plan that scales heads or a hidden channel for the last token has no training forward; {TRAINABLE}"
        )
    if overrides.attend is not None and not overrides.attend.differentiable:
        raise PlanConflictError(f"{type(overrides.attend).__name__} has no gradient; {TRAINABLE}")
