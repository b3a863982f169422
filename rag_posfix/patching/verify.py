"""Checks, on the loaded model itself, that the attention hook computes what the stock model computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import decoder_of, main_device, window_of
from rag_posfix.patching.forward_context import ForwardContext, Overrides, active
from rag_posfix.patching.install import copy_over_weights, stock_copy
from rag_posfix.patching.rotation import rerotate
from rag_posfix.patching.spec import ModelSpec
from rag_posfix.plan.plan import Capability


def check_computed(model: Any) -> None:
    """Compare the rotary frequencies and the scale of the embeddings with the configuration.

    A buffer that its module did not fill holds uninitialised memory: another model at every load.

    Raises:
        UnsupportedModelError: they differ.
    """
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    if rotary is not None:
        loaded = dict(rotary.named_buffers())
        for name, expected in type(rotary)(config=rotary.config).named_buffers():
            held = loaded[name]
            if not held.is_meta and not torch.allclose(held, expected.to(held), rtol=1e-5, atol=0):
                raise _uninitialised_error(model, f"rotary_emb.{name}")
    for name, module in model.named_modules():
        expected = getattr(module, "scalar_embed_scale", None)
        if expected is not None and not math.isclose(float(module.embed_scale), expected, rel_tol=1e-2):  # bfloat16
            raise _uninitialised_error(model, f"{name}.embed_scale")


def _uninitialised_error(model: Any, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} was loaded with a {name} that is not what its configuration says: transformers left "
        "memory uninitialised; load it again, or with another version of transformers"
    )


PROBE_TOKENS = 16
IDLE_TOKENS = 4
DECODE_STEPS = 2
SHIFT = 5
LOGITS = 4
"""Of how many last tokens logits are compared."""

# Largest difference between the logits of the stock model and those through the hook, as a share of the spread of the
# logits. The hook runs the same kernels on the same numbers, so it is 0 on every supported family; a wrong rotation is
# off by 1e-3.
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

# Where the stock model computes the same numbers with matrices of other sizes, the last bits of each layer differ. In
# a batch all matrices have other sizes: Qwen2.5-Coder-0.5B in float32 is off by 1.2e-4 of the spread.
ROUNDING: Mapping[str, int] = {"prompt": 10, "decode": 10, "long_prompt": 10, "batch": 40, "plan": 10, "shifted": 40}

LARGE = 10**9
"""Parameters above which, on the CPU, loading compares the first layers alone: one pass through all layers reads all
weights, some 5 % of the time that loading them took."""

LONG_PROMPT_OPERATIONS: Mapping[str, float] = {"cpu": 5e9}
"""Operations that a pass over the long prompt may take when a model is loaded: some tenths of a second."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Results of the checks.

    Attributes:
        differences: Check -> largest logit difference from the stock model. ``idle``: a prompt without a context, 0
            on a sound model. ``rotation``: the same with the rotation done in the hook; missing where the model does
            not offer it. ``prompt``, ``decode``: the prompt as an engine reads it, and steps after it.
            ``long_prompt``: a prompt that crosses the model's windows, where that is cheap. ``batch``: prompts of two
            lengths in one batch, against each alone; missing where layers drop keys. ``threads``: three prompts at
            the same time, against each alone through the hook; missing where the model is split over processes.
            If ``thorough``, where all keys are kept: ``shifted``, keys rotated further, against the stock model's at
            these positions; ``plan``, two windows at equal positions, against the stock model under that mask.
    """

    differences: Mapping[str, float]

    @property
    def idle_difference(self) -> float:
        """The difference of ``idle``; of the whole prompt for models without the attention hook."""
        return self.differences["idle"] if "idle" in self.differences else self.differences["prompt"]

    @property
    def rotation_difference(self) -> float | None:
        """The difference of ``rotation``; None where the model does not offer it."""
        return self.differences.get("rotation")

    @property
    def max_logit_difference(self) -> float:
        """The larger of the two, which compare the same operations."""
        return max(self.idle_difference, self.rotation_difference or 0.0)


@torch.inference_mode()
def verify(model: Any, spec: ModelSpec, *, thorough: bool = False) -> Verification:
    """Compare the model with the attention hook with the stock model over the same weights, run by stock code.

    A short prompt is read through all layers, everything else through the first layers, as few as hold each kind of
    layer and one more.

    Cost: two passes of all layers over ``IDLE_TOKENS`` tokens (on the CPU one, for more than ``LARGE`` parameters); of
    the first layers, 13 over at most ``PROBE_TOKENS`` tokens and three over the long prompt, and all of
    these again for calls that fit sliding windows (``spec.within``).

    Args:
        model: With the attention hook. Not while it is serving.
        spec: What ``install`` returned for it.
        thorough: Whether all layers are compared and the long prompt crosses the windows, whatever that costs.

    Raises:
        UnsupportedModelError: a difference is more than rounding, a computed buffer is not what the configuration
            says, or the model computes logits that are not finite.
    """
    check_computed(model)
    ids = torch.randint(
        0,
        model.config.get_text_config().vocab_size,
        (1, spec.shape.context_window),
        generator=torch.Generator().manual_seed(0),
    )
    hooked, stock = copy_over_weights(model), stock_copy(model, spec)
    first = _Comparison(hooked, stock, spec, ids.to(main_device(model)))
    results = list(first.idle_in_all_layers(thorough=thorough))
    for each in (hooked, stock):
        decoder = decoder_of(each)
        decoder.layers = decoder.layers[: _first_layers(model, spec)]
    for each in (spec.within, spec):
        if each is not None:
            ids_of_shape = first.ids[:, : each.shape.context_window]
            results += replace(first, spec=each, ids=ids_of_shape).results(thorough=thorough)
    differences: dict[str, float] = {}
    excess: dict[str, str] = {}
    for check, actual, expected in results:
        allowed = TOLERANCE.get(expected.dtype, 1e-5) * float(expected.float().std()) * ROUNDING.get(check, 1)
        difference = float((actual.float() - expected.float()).abs().max())
        differences[check] = max(difference, differences.get(check, 0.0))
        if not difference <= allowed:  # NaN differs too
            excess[check] = f"{check} {difference:.1e}, allowed {allowed:.1e}"
    if excess:
        worst = max(differences[check] for check in excess)
        raise UnsupportedModelError(
            f"{type(model).__name__} differs from native by {worst:.1e} with the attention hook "
            f"({', '.join(excess.values())}); it cannot be patched safely"
        )
    return Verification(differences)


@dataclass(frozen=True, slots=True, eq=False)
class _Comparison:
    """The logits of the model with the hook and of the stock model, check by check.

    Attributes:
        hooked: With the attention hook.
        stock: Without, over the same weights.
        spec: What ``install`` returned.
        ids: (1, T) tokens, T the context window.
    """

    hooked: Any
    stock: Any
    spec: ModelSpec
    ids: Tensor

    def results(self, *, thorough: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield check, logits through the hook, logits of the stock model; a check may come several times."""
        n = min(PROBE_TOKENS, self.spec.original_window or PROBE_TOKENS, self.ids.shape[1]) - DECODE_STEPS
        n_long = self._long_length(thorough)
        prompt = self.ids[:, :n]
        steps = [self.ids[:, position : position + 1] for position in range(n, n + DECODE_STEPS)]
        keeps_all = Capability.FULL_CACHE in self.spec.shape.capabilities
        cache = DynamicCache(config=self.stock.config)
        native, *native_steps = [_logits(self.stock, tokens, cache) for tokens in (prompt, *steps)]
        yield "idle", _logits(self.hooked, prompt), native
        if Capability.ROTATION in self.spec.shape.capabilities:
            positions = torch.arange(n, device=prompt.device, dtype=torch.float32)[None]
            with active(ForwardContext(Overrides(head_scale=_no_divisors), positions, self.spec)):
                yield "rotation", _logits(self.hooked, prompt), native
        read, *read_steps = self._read(prompt, steps)
        yield "prompt", read, native
        for actual, expected in zip(read_steps, native_steps, strict=True):
            yield "decode", actual, expected
        long = _logits(self.stock, self.ids[:, :n_long])
        read_long = self._read_first(n_long)
        yield "long_prompt", read_long, long
        if keeps_all and n // 2 > LOGITS:
            short = _logits(self.stock, self.ids[:, : n // 2])
            yield "batch", self._read_batch(prompt, [n, n // 2]), torch.cat((native, short))
        if thorough and keeps_all:
            yield from self._rerotated(prompt, cache)
            yield ("plan", *self._windows(prompt))
        if self.spec.ranks.count == 1:  # threads of several processes would wait for each other's
            alone = {n // 2: self._read_first(n // 2), n: read, n_long: read_long}
            with ThreadPoolExecutor(len(alone)) as pool:
                for actual, expected in zip(pool.map(self._read_first, alone), alone.values(), strict=True):
                    yield "threads", actual, expected

    def idle_in_all_layers(self, *, thorough: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield as ``results`` for a few tokens; nothing for large models on the CPU, which are read nevertheless.

        Raises:
            UnsupportedModelError: the logits are not finite.
        """
        few = self.ids[:, : min(IDLE_TOKENS, self.spec.original_window or IDLE_TOKENS)]
        idle = _logits(self.hooked, few)
        if not bool(idle.isfinite().all()):
            raise UnsupportedModelError(
                f"{type(self.stock).__name__} computes logits that are not finite, also without the attention hook: "
                "weights are damaged, or overflow in this dtype; load them again, or in another dtype"
            )
        if thorough or few.device.type != "cpu" or sum(map(Tensor.numel, self.stock.parameters())) <= LARGE:
            yield "idle", idle, _logits(self.stock, few)

    @torch.inference_mode()
    def _read_first(self, length: int) -> Tensor:
        """Return the logits after the first tokens; for any thread."""
        return self._read(self.ids[:, :length])[0]

    def _read(self, prompt: Tensor, steps: Sequence[Tensor] = (), cache: Any = None) -> list[Tensor]:
        """Return the logits of a prompt and of each step after it, read as an engine reads them."""
        keeps_all = Capability.FULL_CACHE in self.spec.shape.capabilities
        if cache is None:
            cache = DynamicCache() if keeps_all else DynamicCache(config=self.hooked.config)
        last = prompt.shape[1] + len(steps)
        original = self.spec.original_window
        spec = self.spec if original is None or last <= original else self.spec.extended
        positions = torch.arange(last, device=prompt.device)[None]
        logits = []
        for tokens in (prompt, *steps):
            start = cache.get_seq_length()
            token_positions = positions[:, : start + tokens.shape[1]]
            context = ForwardContext(positions=token_positions.float(), spec=spec, starts=(0,) if keeps_all else None)
            with active(context):
                logits.append(_logits(self.hooked, tokens, cache, token_positions[:, start:]))
        return logits

    def _rerotated(self, prompt: Tensor, cache: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield keys that were rotated further, and those that the stock model has at these positions."""
        if Capability.ROTATION not in self.spec.shape.capabilities:
            return
        n, shifted = prompt.shape[1], DynamicCache(config=self.stock.config)
        _logits(self.stock, prompt, shifted, torch.arange(SHIFT, SHIFT + n, device=prompt.device)[None])
        keys = torch.cat([layer.keys[:, :, :n] for layer in cache.layers if layer.get_seq_length()])
        moved = [layer.keys for layer in shifted.layers if layer.get_seq_length()]
        yield "shifted", rerotate(self.spec, keys, SHIFT), torch.cat(moved)

    def _windows(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a plan of two windows at equal positions, through the hook and by a mask of its own."""
        n, size = prompt.shape[1], max(1, prompt.shape[1] // 4)

        def mask(query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & ((key < size) | (key // size == query // size) | (query >= 3 * size))

        index = torch.arange(n, device=prompt.device)
        positions = (index - size * (index >= 2 * size).long())[None]
        with active(ForwardContext(Overrides(mask=mask), positions.float(), self.spec, starts=(0,))):
            planned = _logits(self.hooked, prompt, None, positions)
        visible = mask(index[:, None], index[None, :])[None, None]
        blocked = torch.zeros(visible.shape, dtype=planned.dtype, device=prompt.device)
        blocked.masked_fill_(~visible, torch.finfo(planned.dtype).min)
        return planned, _logits(self.stock, prompt, None, positions, blocked)

    def _long_length(self, thorough: bool) -> int:
        """Return the length of the long prompt: just beyond the first window, as far as that may cost."""
        windows = [self.spec.original_window, window_of(self.stock.config.get_text_config())]
        first = min((window for window in windows if window is not None), default=2 * PROBE_TOKENS)
        length = min(first + PROBE_TOKENS, self.ids.shape[1])
        if thorough:
            return length
        n_parameters = sum(map(Tensor.numel, decoder_of(self.stock).layers.parameters()))
        affordable = LONG_PROMPT_OPERATIONS.get(self.ids.device.type, 1e13) / (2 * n_parameters)
        return min(length, max(2 * PROBE_TOKENS, int(affordable)))

    def _read_batch(self, prompt: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the logits after the first tokens of a prompt, a row for each length. Shape (R, LOGITS, V).

        All but the last tokens of each row are encoded independently and joined, padded in front; the last tokens are
        read in one pass.
        """
        longest = max(lengths)
        cache, alone = DynamicCache(), [DynamicCache() for _ in lengths]
        for held, length in zip(alone, lengths, strict=True):
            self._read(prompt[:, : length - LOGITS], cache=held)
        for layer in range(len(alone[0].layers)):
            padded = [
                [
                    pad(states, (0, 0, longest - length, 0))
                    for states in (held.layers[layer].keys, held.layers[layer].values)
                ]
                for held, length in zip(alone, lengths, strict=True)
            ]
            cache.update(*(torch.cat(states) for states in zip(*padded, strict=True)), layer)
        columns = torch.arange(longest, device=prompt.device)
        positions = torch.stack([columns - (longest - length) for length in lengths]).clamp(min=0)
        starts = tuple(longest - length for length in lengths)
        rows = torch.cat([prompt[:, length - LOGITS : length] for length in lengths])
        with active(ForwardContext(positions=positions.float(), spec=self.spec, starts=starts)):
            return _logits(self.hooked, rows, cache, positions[:, -LOGITS:])


def _first_layers(model: Any, spec: ModelSpec) -> int:
    """Return how many first layers hold each kind of layer, and one more."""
    n_layers = len(decoder_of(model).layers)
    types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * n_layers
    kinds = [(kind, layer in spec.unrotated) for layer, kind in enumerate(types)]
    return max(kinds.index(kind) for kind in set(kinds)) + 2


def _no_divisors(layer: int, query: Tensor, key: Tensor) -> None:
    """Divide no head's positions: the hook rotates, as the model would."""


def _logits(
    model: Any, ids: Tensor, cache: Any = None, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=LOGITS,
    ).logits
    return logits
