"""Shape and checks of models without the attention hook."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import main_device
from rag_posfix.patching.plain import PlainCache, PlainForward
from rag_posfix.plan.model_shape import Capability, ModelShape

_WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx", "seq_length")
UNSTATED_WINDOW = 32768
"""Context window of models whose configuration states none: recurrent ones."""

PROBE_TOKENS, STEPS = 14, 3
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Largest difference between logits computed with the cache and without, as a share of their spread. Recurrent layers
sum in another order token by token than over a prompt; a lost state differs by the spread itself."""


def plain_shape(config: Any, reason: str) -> ModelShape:
    """Return the shape of a model of which only the rows of a plan may change, by its text configuration."""

    def first(*names: str, default: int) -> int:
        return next((v for name in names if isinstance(v := _value(config, name), int) and v > 0), default)

    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads", default=1)
    hidden = first("hidden_size", "n_embd", "d_model", "dim", default=1)
    return ModelShape(
        n_layers=first("num_hidden_layers", "n_layer", "n_layers", "num_layers", default=1),
        n_heads=heads,
        n_kv_heads=first("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=first("head_dim", default=max(1, hidden // heads)),
        hidden_size=hidden,
        context_window=first(*_WINDOWS, default=UNSTATED_WINDOW),
        capabilities=frozenset(),
        lacks=dict.fromkeys(Capability, f"{config.model_type} runs without the attention hook ({reason})"),
    )


def _value(config: Any, name: str) -> Any:
    """Return an attribute of a configuration; None where it is missing, or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # configurations raise errors of their own where an attribute differs from layer to layer
        return None


@torch.inference_mode()
def verify_plain(model: Any, forward: PlainForward) -> tuple[PlainForward, dict[str, float]]:
    """Compare prompt, steps and continuations on the model's own cache with one pass of the stock model without one.

    Returns how the model is called from now on, and the differences by check: ``prompt``, ``decode``, ``continue``.

    Raises:
        UnsupportedModelError: they differ by more than rounding, are not finite, or later tokens change earlier ones.
    """
    try:
        return _verify(model, forward)
    except UnsupportedModelError:
        raise
    except Exception as error:  # models of any kind, called as decoders are
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(f"{type(model).__name__} cannot read a plain prompt: {reason}") from error


def _verify(model: Any, forward: PlainForward) -> tuple[PlainForward, dict[str, float]]:
    size = int(getattr(model.config.get_text_config(decoder=True), "vocab_size", 0)) or model.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size, (1, PROBE_TOKENS + STEPS), generator=generator).to(main_device(model))
    full = forward(model, ids, None, STEPS + 1).float()
    if not bool(full.isfinite().all()):
        raise UnsupportedModelError(f"{type(model).__name__} computes logits that are not finite; load other weights")
    cache = PlainCache()
    prompt = forward(model, ids[:, :PROBE_TOKENS], cache, 1)
    if cache.held is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} returns no {forward.cache} that an answer could continue; it is not a decoder"
        )
    steps = [forward(model, ids[:, i : i + 1], cache, 1) for i in range(PROBE_TOKENS, PROBE_TOKENS + STEPS)]
    differences = {"prompt": _difference(prompt, full[:, :1]), "decode": _difference(torch.cat(steps, 1), full[:, 1:])}
    allowed = TOLERANCE.get(model.dtype, 1e-3) * float(full.std())
    _raise_excess(model, differences, allowed)
    continued = PlainCache()
    forward(model, ids[:, :PROBE_TOKENS], continued, 1)
    try:
        at_once = _difference(forward(model, ids[:, PROBE_TOKENS:], continued, STEPS), full[:, 1:])
    except (RuntimeError, ValueError, IndexError, NotImplementedError):  # what models raise that take single tokens
        at_once = float("inf")
    if not at_once <= allowed:
        return replace(forward, single_steps=True), differences
    return forward, {**differences, "continue": at_once}


def _difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected).abs().max())


def _raise_excess(model: Any, differences: dict[str, float], allowed: float) -> None:
    excess = [f"{check} {value:.1e}" for check, value in differences.items() if not value <= allowed]
    if excess:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits with its cache than without ({', '.join(excess)}, allowed "
            f"{allowed:.1e}): it is not a decoder, or its cache cannot be used; use another model"
        )
