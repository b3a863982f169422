"""Models without the attention hook: they read plain prompts, rows in one batch, on their own cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.snapshots import SnapshotForm

_CACHES = ("past_key_values", "cache_params", "state")
"""What models call their cache, as an argument and in their output."""


@dataclass(frozen=True, slots=True)
class KeptKeys:
    """What each layer keeps of a token: key heads, channels of a key, value heads, channels of a value.

    Layers may differ, and keys may have other channels than values. The passage store gets one flat row for each
    token: the keys of all layers end to end, then the values, the shorter of the two padded with zeros.
    """

    layers: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, held: Any, n_tokens: int) -> KeptKeys | None:
        """Return what a cache keeps; None if a layer of it does not keep keys and values of all ``n_tokens``."""
        if type(held) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in held.layers):
            return None
        pairs = [(layer.keys, layer.values) for layer in held.layers]
        every = [states for pair in pairs for states in pair]
        if not every or any(states is None or states.ndim != 4 or states.shape[2] != n_tokens for states in every):
            return None
        return cls(tuple((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]) for keys, values in pairs))

    @property
    def width(self) -> int:
        """Numbers of a token's keys, or of its values, whichever are more."""
        keys, values = (sum(each[i] * each[i + 1] for each in self.layers) for i in (0, 2))
        return max(keys, values)

    def flatten(self, held: Any, start: int, stop: int, row: int) -> Tensor:
        """Return a copy of the keys and values of some tokens of a row, (2, 1, 1, stop - start, width)."""
        halves = []
        for name in ("keys", "values"):
            states = [getattr(layer, name)[row, :, start:stop].transpose(0, 1).flatten(1) for layer in held.layers]
            joined = torch.cat(states, dim=1)
            halves.append(functional.pad(joined, (0, self.width - joined.shape[1])))
        return torch.stack(halves)[:, None, None]

    def cache(self, rows: Sequence[Tensor]) -> DynamicCache:
        """Return a cache that holds rows of flat keys and values of one length, (2, 1, 1, T, width) each."""
        cache, both = DynamicCache(), torch.cat([row[:, 0] for row in rows], dim=1)  # (2, R, T, width)
        starts = [0, 0]
        for index, each in enumerate(self.layers):
            states = []
            for half, (heads, channels) in enumerate((each[:2], each[2:])):
                numbers = both[half, :, :, starts[half] : starts[half] + heads * channels]
                states.append(numbers.reshape(*numbers.shape[:2], heads, channels).transpose(1, 2).contiguous())
                starts[half] += heads * channels
            cache.update(*states, index)
        return cache


class PlainCache:
    """The cache of a model without the attention hook, whatever kind the model makes.

    Attributes:
        held: The model's own cache; None before the first pass.
        starts: The first token of each row; those before it are padding. Empty: all rows start at 0.
        length: Tokens of a row, padding included.
    """

    def __init__(self, starts: tuple[int, ...] = (), held: Any = None, length: int = 0) -> None:
        self.starts, self.held, self.length = starts, held, length

    @property
    def layers(self) -> list[Any]:
        """The layers that keep keys and values, as transformers' caches list them."""
        return list(getattr(self.held, "layers", ()))

    def select(self, rows: Sequence[int], index: Tensor) -> PlainCache:
        """Return the cache with only some of its rows; this one must not be used any more."""
        self.held.reorder_cache(index)  # of recurrent layers too, whose states ``batch_select_indices`` leaves alone
        return PlainCache(tuple(self.starts[row] for row in rows) if self.starts else (), self.held, self.length)


@dataclass(frozen=True, slots=True)
class PlainForward:
    """How a model without the attention hook is called.

    Attributes:
        reason: Why it has no attention hook.
        cache: Name of its cache, as an argument and in its output.
        keeps_logits: Whether it takes ``logits_to_keep``.
        single_steps: Whether tokens after the prompt are read one by one: with several at once the model forgets its
            cache.
        takes_positions: Whether it takes ``position_ids``.
        needs_positions: Whether it gets them in every pass: some models begin to count anew after their cache.
        batch: How it reads rows of different lengths, padded in front, in one batch: ``masked``, with a mask in every
            pass; ``masked prompt``, with a mask in the pass over the prompt alone, for layers that keep no keys; empty
            where neither gives what each row gives alone.
        kept: What its layers keep of each token, where a cache can be filled with it.
        snapshots: Its cache as a whole, where that can be saved and filled, and ``kept`` is None.
        joins: When rows of different lengths that were read apart are joined in one cache: before the ``question``,
            before the ``answer``, or not at all.
    """

    reason: str
    cache: str
    keeps_logits: bool
    single_steps: bool = False
    takes_positions: bool = False
    needs_positions: bool = False
    batch: Literal["", "masked", "masked prompt"] = ""
    kept: KeptKeys | None = None
    snapshots: SnapshotForm | None = None
    joins: Literal["", "question", "answer"] = ""

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
        return cls(reason, name, "logits_to_keep" in arguments, takes_positions="position_ids" in arguments)

    def __call__(self, model: Any, ids: Tensor, cache: PlainCache | None, keep: int | Tensor) -> Tensor:
        """Append (R, Tq) tokens and return the logits of the last ``keep``, or of a tensor of indices, (R, K, V)."""
        if cache is not None and cache.held is not None and self.single_steps and ids.shape[1] > 1:
            steps = [self(model, ids[:, i : i + 1], cache, 1) for i in range(ids.shape[1])]
            return _last(torch.cat(steps, dim=1), keep)
        options: dict[str, Any] = {"logits_to_keep": keep} if self.keeps_logits else {}
        if cache is not None:
            options[self.cache] = cache.held
            options |= self._padding(cache, ids)
        output = model(input_ids=ids, use_cache=cache is not None, return_dict=True, **options)
        if cache is not None:
            cache.held = getattr(output, self.cache, None)
            cache.length += ids.shape[1]
        logits: Tensor = output.logits
        return logits if self.keeps_logits else _last(logits, keep)

    def _padding(self, cache: PlainCache, ids: Tensor) -> dict[str, Tensor]:
        """Return the mask that hides the padding of rows, and the positions that their tokens have without it."""
        is_padded = any(cache.starts)
        if not is_padded and not self.needs_positions:
            return {}
        places = torch.arange(cache.length + ids.shape[1], device=ids.device)
        starts = torch.tensor(cache.starts or (0,) * len(ids), device=ids.device)[:, None]
        options = {}
        if is_padded and (self.batch == "masked" or not cache.length):
            options["attention_mask"] = (places >= starts).long()
        if self.takes_positions:
            options["position_ids"] = (places[cache.length :] - starts).clamp(min=0)
        return options


def _last(logits: Tensor, keep: int | Tensor) -> Tensor:
    return logits[:, keep] if isinstance(keep, Tensor) else logits[:, -keep:]
