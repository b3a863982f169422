"""Models without the attention hook: they read plain prompts, one row after another, on their own cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rag_posfix.errors import UnsupportedModelError

_CACHES = ("past_key_values", "cache_params", "state")
"""What models call their cache, as an argument and in their output."""


class PlainCache:
    """The cache of a model without the attention hook, whatever kind the model makes; one row."""

    def __init__(self) -> None:
        self.held: Any = None

    @property
    def layers(self) -> list[Any]:
        """The layers that keep keys and values, as transformers' caches list them."""
        return list(getattr(self.held, "layers", ()))


@dataclass(frozen=True, slots=True)
class PlainForward:
    """How a model without the attention hook is called.

    Attributes:
        reason: Why it has no attention hook.
        cache: Name of its cache, as an argument and in its output.
        keeps_logits: Whether it takes ``logits_to_keep``.
        single_steps: Whether tokens after the prompt are read one by one: with several at once the model forgets its
            cache.
    """

    reason: str
    cache: str
    keeps_logits: bool
    single_steps: bool = False

    @classmethod
    def of(cls, model: Any, reason: str) -> PlainForward:
        """Return how a model is called, by the arguments of its forward pass.

        Raises:
            UnsupportedModelError: it has no cache that a call could continue.
        """
        arguments = inspect.signature(model.forward).parameters
        name = next((name for name in _CACHES if name in arguments), None)
        if name is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no cache that decoding could continue ({reason}); use a decoder"
            )
        return cls(reason, name, "logits_to_keep" in arguments)

    def __call__(self, model: Any, ids: Tensor, cache: PlainCache | None, keep: int | Tensor) -> Tensor:
        """Append (1, Tq) tokens and return the logits of the last ``keep``, or of a tensor of indices, (1, K, V)."""
        if cache is not None and cache.held is not None and self.single_steps and ids.shape[1] > 1:
            steps = [self(model, ids[:, i : i + 1], cache, 1) for i in range(ids.shape[1])]
            return _last(torch.cat(steps, dim=1), keep)
        options: dict[str, Any] = {"logits_to_keep": keep} if self.keeps_logits else {}
        if cache is not None:
            options[self.cache] = cache.held
        output = model(input_ids=ids, use_cache=cache is not None, return_dict=True, **options)
        if cache is not None:
            cache.held = getattr(output, self.cache, None)
        logits: Tensor = output.logits
        return logits if self.keeps_logits else _last(logits, keep)


def _last(logits: Tensor, keep: int | Tensor) -> Tensor:
    return logits[:, keep] if isinstance(keep, Tensor) else logits[:, -keep:]
