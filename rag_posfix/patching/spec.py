"""The specification of a patched model, and the ranks that it is split over.

Models without the attention hook: they read plain prompts, rows in one batch, on their own cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.snapshots import SnapshotForm
from rag_posfix.plan.plan import ModelShape

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


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks of a tensor-parallel model. With one process every method is the identity.

    Methods are collective: all ranks call them in the same order, with tensors of the same shape.

    Attributes:
        count: How many processes.
        rank: Which of them this is, from 0.
        control: Process group for what is not on the model's device; needed with two processes or more. It waits for
            ever: the other ranks wait in it for commands of the first rank.
        patience: How long ranks wait for each other in the middle of a step.
    """

    count: int = 1
    rank: int = 0
    control: Any = None
    patience: timedelta = timedelta(minutes=10)

    def wait(self) -> None:
        """Wait until all ranks are here, as long as it takes; one that has ended is an error."""
        if self.count > 1:
            torch.distributed.barrier(group=self.control)

    def mean(self, over_heads: Tensor) -> Tensor:
        """Return a mean over this rank's heads as the mean over all heads. Ranks have equally many heads."""
        if self.count == 1:
            return over_heads
        total = over_heads.clone()
        torch.distributed.all_reduce(total)
        return total / self.count

    def gather(self, local_heads: Tensor, size: int, dim: int) -> Tensor:
        """Return the tensors of all ranks, concatenated in their order along one axis.

        Some families' projections are gathered before attention: there each rank has all heads already.

        Args:
            size: Length of the axis on all ranks together; a tensor of that length is returned unchanged.
        """
        if local_heads.shape[dim] == size:
            return local_heads
        local_heads = local_heads.contiguous()
        gathered = [torch.empty_like(local_heads) for _ in range(self.count)]
        torch.distributed.all_gather(gathered, local_heads)
        return torch.cat(gathered, dim=dim)

    def own_heads(self, values: Tensor, n_own: int) -> Tensor:
        """Return the values of this rank's heads. Shapes: (H, ...) -> (n_own, ...)."""
        if values.shape[0] == n_own:
            return values
        return values[self.rank * n_own : (self.rank + 1) * n_own]

    def broadcast_decision(self, decision: Tensor) -> Tensor:
        """Return the first rank's decision: what others computed may differ from it in the last digit."""
        if self.count == 1:
            return decision
        message = decision.cpu().contiguous()
        self.broadcast(message, no_timeout=False)
        return message.to(decision.device)

    def broadcast(self, values: Tensor, *, no_timeout: bool) -> None:
        """Fill ``values`` on all ranks with the values of the first rank.

        Args:
            values: On the CPU.
            no_timeout: Wait as long as it takes, not only as long as in the middle of a step.
        """
        work: Any = torch.distributed.broadcast(values, 0, group=self.control, async_op=True)
        if no_timeout:
            work.wait()
        else:
            work.wait(self.patience)


Rotation = Literal["half", "interleaved", "other"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one family of models handles positions.

    Attributes:
        model_type: ``config.model_type``.
        rotation: How it pairs channels when it rotates queries and keys.
        linear: Whether queries and keys are linear in the normalised hidden state: no norm of their own.
        one_base: Whether all layers rotate by the same angles.
        softmax: Whether attention is the softmax of scaled scores: no soft caps, no sinks.
        complex_angles: Whether layers get their angles as complex numbers, not as cosines and sines.
    """

    model_type: str
    rotation: Rotation
    linear: bool
    one_base: bool = True
    softmax: bool = True
    complex_angles: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A model as it was loaded, in most cases with the attention hook.

    Attributes:
        family: Its row in the table of families, or what was read from the model itself.
        shape: Sizes and capabilities of the whole model, however many ranks it is split over.
        angles: (states, (B, T) positions, factor of the RoPE base or None) -> (cos, sin), each (B, T, rotated), from
            the model's own rotary module, in the dtype of ``states``.
        handles: The module hooks that were put on the model.
        ranks: The processes that the model is split over.
        original_window: The most positions that a call may have under ``angles``; None: as many as the context window.
        unrotated: Layers whose queries and keys are not rotated.
        unhooked: How the model is called without the attention hook; None where it has the hook.
        windowed: The same model for calls that fit its sliding windows, ``windowed.shape.context_window`` tokens: it
            keeps all keys. None where there are no windows, or others.
        is_listed: Whether the family is in the table; else the model itself passed every check at load.
        attention: transformers' name of the attention that the hook takes the place of: ``sdpa`` or ``eager``.
        extended: The same model for calls with more positions: LongRoPE then rotates all of them by other
            frequencies.
    """

    family: Family
    shape: ModelShape
    angles: Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]
    handles: tuple[Any, ...]
    ranks: Ranks = field(default_factory=Ranks)
    original_window: int | None = None
    unrotated: frozenset[int] = frozenset()
    unhooked: PlainForward | None = None
    windowed: ModelSpec | None = None
    extended: ModelSpec | None = None
    is_listed: bool = True
    attention: str = "sdpa"

    @property
    def reading(self) -> str:
        """How prompts are read: with the attention hook, listed or proved at load, or as plain prompts."""
        if self.unhooked is not None:
            return f"plain prompts: {self.unhooked.reason}"
        return "the attention hook (listed family)" if self.is_listed else "the attention hook (proved at load)"

    @property
    def structure(self) -> dict[str, Any]:
        """What is known of attention: how channels are paired, which layers do not rotate, whether keys are linear.

        Of a model without the attention hook: whether it reads rows in one batch, and what of its cache can be stored.
        """
        if self.unhooked is not None:
            return {
                "rows_in_one_batch": self.unhooked.batch != "",
                "stored_keys": self.unhooked.kept is not None,
                "stored_snapshots": self.unhooked.snapshots is not None,
            }
        return {
            "rotation": self.family.rotation,
            "unrotated_layers": sorted(self.unrotated),
            "linear_in_hidden_state": self.family.linear,
            "one_set_of_angles": self.family.one_base,
            "plain_softmax": self.family.softmax,
        }
