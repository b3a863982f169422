"""Installs the attention hook on a model, once, at load.

Prepares a loaded model: with the attention hook where that is listed or proved, as plain rows elsewhere.

Checks, on the loaded model itself, that the attention hook computes what the stock model computes.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.attention_hook import (
    ForwardContext,
    Overrides,
    active,
    angle_layout,
    before_attention,
    current,
    eager_attention_of,
    hooked_attention,
    hooked_eager_attention,
    hooked_eager_mask,
    hooked_mask,
    rerotate,
    scaled_base_angles,
)
from rag_posfix.patching.snapshots import SnapshotError, SnapshotForm
from rag_posfix.patching.spec import Family, KeptKeys, ModelSpec, PlainCache, PlainForward, Ranks
from rag_posfix.patching.structure import (
    FAMILIES,
    UNSUPPORTED,
    Structure,
    decoder_of,
    family_of,
    main_device,
    original_window_of,
    read_structure,
    rope_type_of,
    shape_as_placed,
    shape_of,
    shape_within,
    window_of,
)
from rag_posfix.plan.plan import Capability, ModelShape

ATTENTION_NAME = "rag_posfix"
HOOKED: Mapping[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "sdpa": (ATTENTION_NAME, hooked_attention, hooked_mask),
    "eager": (f"{ATTENTION_NAME}_eager", hooked_eager_attention, hooked_eager_mask),
}
"""Stock attention -> name, attention function and mask function of the hook in its place."""


def install(model: Any, ranks: Ranks | None = None, structure: Structure | None = None) -> ModelSpec:
    """Route a model's attention through the attention hook and return what is known of the model.

    Idle, the model computes bit for bit what it computed before with ``sdpa`` attention, or with ``eager`` where its
    family is not listed and has no other. No class is subclassed,
    copied or monkey-patched: the attention and mask functions are registered under one name (that of this library)
    and chosen for this model alone, and one hook is put in front of each of its attention modules.

    LongRoPE and dynamic NTK scaling write frequencies on the rotary module that all threads share, by the last
    position of each pass. Here the module keeps the frequencies of the original window, and ``ModelSpec.extended`` has
    those beyond it. Idle, the model computes what it computed before within the original window only.

    Args:
        structure: What was read from a model whose family is not in the table.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is built in an unexpected way.
    """
    config = model.config.get_text_config(decoder=True)
    family = family_of(config) if structure is None else structure.family
    decoder = decoder_of(model)
    rotary = getattr(decoder, "rotary_emb", None)
    modules: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if rotary is None or not modules or None in modules:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no model.rotary_emb and model.layers[i].self_attn; the attention hook "
            "needs a decoder with one rotary module and one attention module per layer"
        )
    stock = config._attn_implementation
    if stock.startswith(ATTENTION_NAME):
        raise UnsupportedModelError(f"{type(model).__name__} has the attention hook already; install it once, at load")
    if rope_type_of(config) in ("dynamic", "longrope"):
        rotary.inv_freq.copy_(rotary.original_inv_freq)
        rotary.rope_type = "default"  # what transformers looks at before it writes other frequencies
    if structure is None or stock not in HOOKED:
        stock = "sdpa"
    if stock == "eager":
        for module in modules:
            eager_attention_of(module)  # raises where there is none
    name, attention, mask = HOOKED[stock]
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)  # without it, causality and padding would be lost
    model.set_attn_implementation(name)
    spec = ModelSpec(
        family=family,
        shape=shape_as_placed(shape_of(config, family), model, modules),
        angles=_angles_of(rotary),
        handles=tuple(module.register_forward_pre_hook(before_attention, with_kwargs=True) for module in modules),
        ranks=ranks or Ranks(),
        unrotated=_unrotated(modules) if structure is None else structure.unrotated,
        is_listed=structure is None,
        attention=stock,
    )
    if (within := shape_within(config, family)) is not None:
        spec = replace(spec, windowed=replace(spec, shape=shape_as_placed(within, model, modules)))
    window = original_window_of(config)
    return spec if window is None else _add_extended(spec, rotary, config, window)


def uninstall(model: Any, spec: ModelSpec, implementation: str) -> None:
    """Take the attention hook off a model and give it back its attention."""
    for handle in spec.handles:
        handle.remove()
    model.set_attn_implementation(implementation)


def _unrotated(modules: Sequence[Any]) -> frozenset[int]:
    """Return the layers without RoPE of a listed family: SmolLM3 leaves every fourth layer unrotated."""
    return frozenset(index for index, module in enumerate(modules) if not getattr(module, "use_rope", True))


def _angles_of(rotary: Any) -> Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]:
    """Return ``ModelSpec.angles`` by a rotary module."""
    forward = type(rotary).forward
    layout = angle_layout(rotary)

    def angles(states: Tensor, positions: Tensor, base_factor: float | None = None) -> tuple[Tensor, Tensor]:
        if base_factor is not None and base_factor != 1.0:
            return scaled_base_angles(rotary, states, positions, base_factor, layout)
        cos, sin = forward(rotary, states, positions)
        return cos, sin

    return angles


def new_rotary(rotary: Any, config: Any) -> Any:
    """Return a rotary module as stock code makes it from the configuration."""
    return type(rotary)(config).to(next(rotary.buffers()))


def _add_extended(spec: ModelSpec, rotary: Any, config: Any, window: int) -> ModelSpec:
    """Return the spec of a model with LongRoPE: contexts with ``extended`` rotate by the long frequencies."""
    long = new_rotary(rotary, config)
    long(torch.zeros(1, device=long.inv_freq.device), torch.tensor([[window]], device=long.inv_freq.device))
    long.rope_type = "default"
    extended = replace(spec, angles=_angles_of(long))

    def select_frequencies(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], original: Any) -> Any:
        context = current()
        if context is None:
            return original
        contexts = context.by_rows(original[0].shape[0])
        if not any(row_context.spec is extended for _, row_context in contexts):
            return original
        extended_angles = type(long).forward(long, *arguments, **options)
        chosen = [
            (extended_angles if row_context.spec is extended else original, rows) for rows, row_context in contexts
        ]
        return tuple(torch.cat([angles[i][rows] for angles, rows in chosen]) for i in (0, 1))

    handle = rotary.register_forward_hook(select_frequencies, with_kwargs=True)
    return replace(spec, handles=(*spec.handles, handle), original_window=window, extended=extended)


def copy_over_weights(model: Any) -> Any:
    """Return a copy of a model, hooks included, that shares all modules without modules inside: the weights."""
    leaves = (module for module in model.modules() if next(module.children(), None) is None)
    return copy.deepcopy(model, {id(each): each for each in chain(model.parameters(), model.buffers(), leaves)})


def stock_copy(model: Any, spec: ModelSpec) -> Any:
    """Return a second model over the same weights without the attention hook: for comparing in one process.

    Its rotary module is made anew from the configuration.
    """
    stock = copy_over_weights(model)
    if spec.unhooked is not None:
        return stock
    decoder = decoder_of(stock)
    decoder.rotary_emb = new_rotary(decoder.rotary_emb, stock.config.get_text_config(decoder=True))
    handles = {handle.id for handle in spec.handles}
    for module in stock.modules():
        for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs):
            for number in handles.intersection(hooks):
                del hooks[number]
    stock.set_attn_implementation(spec.attention)
    return stock


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
    these again for calls that fit sliding windows (``spec.windowed``).

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
    for each in (spec.windowed, spec):
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


_log = logging.getLogger(__name__)

_WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx", "seq_length")
_UNSTATED_WINDOW = 32768
"""Context window of models whose configuration states none: recurrent ones."""

_PLAIN_TOKENS, _STEPS = 14, 3
_PLAIN_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-1}
"""Largest difference between logits computed with the cache and without, as a share of their spread. Recurrent layers
sum in another order token by token than over a prompt; a lost state differs by the spread itself."""


_EXACT_TOLERANCE = 0.1
"""Of that tolerance, in float32, for several tokens after others: some models read them as if nothing were before."""


def prepare(model: Any, ranks: Ranks | None = None) -> ModelSpec:
    """Install the attention hook and verify it, or verify that the model reads plain prompts.

    Models of a listed family get the hook. Other models get it if what is read from their attention modules passes
    every check of ``verify``. The remaining ones run without it, held to their own logits without a cache.

    Raises:
        UnsupportedModelError: a listed family fails a check, the model is no decoder with a cache, or it is split over
            processes and its family is not listed.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type in FAMILIES or (ranks is not None and ranks.count > 1):
        spec = install(model, ranks)
        spec.ranks.wait()  # loading takes each rank its time; in a step they wait for each other only so long
        verify(model, spec)
        return spec
    try:
        spec = _prove(model, config._attn_implementation)
    except UnsupportedModelError as error:
        reason = UNSUPPORTED.get(config.model_type) or str(error)
        forward, _ = verify_plain(model, PlainForward.of(model, reason))
        _log.warning("%s is read as plain prompts, without the attention hook: %s", config.model_type, reason)
        return ModelSpec(
            Family(config.model_type, "other", linear=False),
            plain_shape(config, reason),
            _no_angles,
            (),
            unhooked=forward,
        )
    _log.info("%s is not listed; its attention passed every check with the hook", config.model_type)
    return spec


def _prove(model: Any, implementation: str) -> ModelSpec:
    """Return the spec of an unlisted model whose attention passes every check, or leave the model as it was."""
    if implementation not in HOOKED:
        raise UnsupportedModelError(f"its attention is {implementation}, and the hook computes as sdpa or eager does")
    layers = DynamicCache(config=model.config).layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise UnsupportedModelError("some of its layers are recurrent and keep no keys")
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise UnsupportedModelError("its layers keep more than keys and values")
    spec = None
    try:
        spec = install(model, structure=read_structure(model))
        verify(model, spec, thorough=True)
    except Exception as error:  # a model that fails in any way is read without the hook
        if spec is not None:
            uninstall(model, spec, implementation)
        raise UnsupportedModelError(" ".join(str(error).split())[:200]) from error
    return spec


def check_again(model: Any, spec: ModelSpec) -> Verification:
    """Return the results of every check on a prepared model, whatever they cost. Errors as those of ``prepare``."""
    if spec.unhooked is None:
        return verify(model, spec, thorough=True)
    _, differences = verify_plain(model, spec.unhooked)
    return Verification(differences)


def _no_angles(states: Tensor, positions: Tensor, base_factor: float | None = None) -> tuple[Tensor, Tensor]:
    raise UnsupportedModelError("a model without the attention hook has no angles; please report this")


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
        context_window=first(*_WINDOWS, default=_UNSTATED_WINDOW),
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

    Then a cache filled with the keys of another or with a snapshot of it, and two rows of different length in one
    batch, are compared in the same way; where they differ, the model is not called so.

    Returns how the model is called from now on, and the differences by check: ``prompt``, ``decode``, ``continue``,
    ``keys`` or ``snapshot``, ``rows``, ``joined``.

    Raises:
        UnsupportedModelError: they differ by more than rounding, are not finite, or later tokens change earlier ones.
    """
    try:
        try:
            return _compare_plain(model, forward)
        except UnsupportedModelError:
            if not forward.takes_positions or forward.needs_positions:
                raise
            return _compare_plain(model, replace(forward, needs_positions=True))
    except UnsupportedModelError:
        raise
    except Exception as error:  # models of any kind, called as decoders are
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(f"{type(model).__name__} cannot read a plain prompt: {reason}") from error


def _compare_plain(model: Any, forward: PlainForward) -> tuple[PlainForward, dict[str, float]]:
    size = int(getattr(model.config.get_text_config(decoder=True), "vocab_size", 0)) or model.vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size, (1, _PLAIN_TOKENS + _STEPS), generator=generator).to(main_device(model))
    full = forward(model, ids, None, _STEPS + 1).float()
    if not bool(full.isfinite().all()):
        raise UnsupportedModelError(f"{type(model).__name__} computes logits that are not finite; load other weights")
    cache = PlainCache()
    prompt = forward(model, ids[:, :_PLAIN_TOKENS], cache, 1)
    if cache.held is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} returns no {forward.cache} that an answer could continue; it is not a decoder"
        )
    steps = [forward(model, ids[:, i : i + 1], cache, 1) for i in range(_PLAIN_TOKENS, _PLAIN_TOKENS + _STEPS)]
    differences = {"prompt": _difference(prompt, full[:, :1]), "decode": _difference(torch.cat(steps, 1), full[:, 1:])}
    allowed = _PLAIN_TOLERANCE.get(model.dtype, 1e-3) * float(full.std())
    _raise_excess(model, differences, allowed)
    continued = PlainCache()
    forward(model, ids[:, :_PLAIN_TOKENS], continued, 1)
    at_once = _tried(lambda: _difference(forward(model, ids[:, _PLAIN_TOKENS:], continued, _STEPS), full[:, 1:]))
    exact = _EXACT_TOLERANCE * allowed if model.dtype == torch.float32 else allowed
    if not at_once <= exact:
        forward = replace(forward, single_steps=True)
    else:
        differences["continue"] = at_once
        kept = KeptKeys.of(cache.held, _PLAIN_TOKENS + _STEPS)
        filled = inf if kept is None else _tried(lambda: _compare_filled(model, forward, kept, ids, full))
        if filled <= allowed:
            forward = replace(forward, kept=kept)
            differences["keys"] = filled
        else:
            forward, difference = _with_snapshots(model, forward, ids, full, exact)
            differences |= difference
    tried = replace(forward, batch="masked" if any(map(_keeps_keys, cache.layers)) else "masked prompt")
    rows = _tried(lambda: _compare_rows(model, tried, ids, full))
    if not rows <= allowed:
        return forward, differences
    differences["rows"] = rows
    if tried.snapshots is None:
        return tried, differences
    joins: tuple[Literal["question", "answer"], ...] = ("question", "answer")
    for join in joins:
        joining = replace(tried, joins=join)
        joined = _tried(lambda: _compare_joined(model, joining, ids, full))  # noqa: B023 - called here
        if joined <= allowed:
            return joining, {**differences, "joined": joined}
    return tried, differences


def _with_snapshots(
    model: Any, forward: PlainForward, ids: Tensor, full: Tensor, allowed: float
) -> tuple[PlainForward, dict[str, float]]:
    """Return how a model is called whose cache was saved and filled, and the difference; unchanged if that fails."""
    before = PlainCache()
    forward(model, ids[:, : _PLAIN_TOKENS // 2], before, 1)
    try:
        form = SnapshotForm.of(before.held)
    except SnapshotError:
        return forward, {}
    tried = replace(forward, snapshots=form)
    difference = _tried(lambda: _compare_snapshot(model, tried, form, ids, full))
    return (tried, {"snapshot": difference}) if difference <= allowed else (forward, {})


def _keeps_keys(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _tried(compare: Callable[[], float]) -> float:
    """Return the difference that a comparison gives, infinity where the model cannot be called like that."""
    try:
        return compare()
    except Exception:  # a model of any kind, called in a way that it may not have been written for
        return inf


def _compare_filled(model: Any, forward: PlainForward, kept: KeptKeys, ids: Tensor, full: Tensor) -> float:
    """Return the difference to ``full`` of a prompt whose first half is taken from another cache."""
    before, half = PlainCache(), _PLAIN_TOKENS // 2
    forward(model, ids[:, :_PLAIN_TOKENS], before, 1)
    filled = PlainCache((), kept.cache([kept.flatten(before.held, 0, half, 0)]), half)
    return _difference(forward(model, ids[:, half:], filled, _STEPS + 1), full)


def _compare_snapshot(model: Any, forward: PlainForward, form: SnapshotForm, ids: Tensor, full: Tensor) -> float:
    """Return the difference to ``full`` of two prompts after a snapshot of their first half, one after the other."""
    half, before = _PLAIN_TOKENS // 2, PlainCache()
    forward(model, ids[:, :half], before, 1)
    snapshot = form.save(before.held)
    forward(model, ids[:, half:].flip(1), before, 1)  # must not reach the snapshot
    differences = []
    for _ in range(2):
        cache = PlainCache((), form.fill([snapshot]), half)
        differences.append(_difference(forward(model, ids[:, half:], cache, _STEPS + 1), full))
    return max(differences)


@torch.inference_mode()
def snapshot_bytes(model: Any, forward: PlainForward, n_tokens: int) -> list[tuple[str, int]]:
    """Return the kind of each layer of a model's cache, and the bytes of a snapshot of it after ``n_tokens``."""
    cache, ids = PlainCache(), torch.arange(n_tokens, device=main_device(model)) % 100
    forward(model, ids[None], cache, 1)
    form, layers = SnapshotForm.of(cache.held), cache.held.layers
    return [(type(layer).__name__, len(form.save(Cache(layers=[layer])))) for layer in layers]


def _compare_joined(model: Any, forward: PlainForward, ids: Tensor, full: Tensor) -> float:
    """Return the difference to single rows of two rows of different length that are joined in one cache."""
    form, skipped, half = forward.snapshots, _PLAIN_TOKENS // 4, _PLAIN_TOKENS // 2
    if form is None:
        return inf
    shorter, rows = ids[:, skipped:], (PlainCache(), PlainCache())
    parts, single = (shorter[:, :-_STEPS], *torch.split(shorter[:, -_STEPS:], 1, dim=1)), PlainCache()
    alone = torch.cat([forward(model, part, single, 1) for part in parts], dim=1)
    joined_at = half if forward.joins == "question" else _PLAIN_TOKENS
    forward(model, ids[:, :joined_at], rows[0], 1)
    forward(model, shorter[:, : joined_at - skipped], rows[1], 1)
    cache = PlainCache((0, skipped), form.join([row.held for row in rows]), joined_at)
    both, logits = ids.expand(2, -1), []
    if joined_at < _PLAIN_TOKENS:
        logits.append(forward(model, both[:, joined_at:_PLAIN_TOKENS], cache, 1))
    logits += [forward(model, both[:, i : i + 1], cache, 1) for i in range(_PLAIN_TOKENS, _PLAIN_TOKENS + _STEPS)]
    last = torch.cat(logits, dim=1)
    expected = torch.cat((full, alone)).float()
    return _difference(last, expected[:, -last.shape[1] :])


def _compare_rows(model: Any, forward: PlainForward, ids: Tensor, full: Tensor) -> float:
    """Return the difference to single rows of two rows of different length in a batch, one of which then goes on."""
    skipped = _PLAIN_TOKENS // 2
    shorter, single = ids[:, skipped:], PlainCache()
    steps = [shorter[:, : _PLAIN_TOKENS - skipped], *torch.split(shorter[:, _PLAIN_TOKENS - skipped :], 1, dim=1)]
    alone = torch.cat([forward(model, step, single, 1) for step in steps], dim=1)
    padded = torch.cat((ids, torch.nn.functional.pad(shorter, (skipped, 0))))
    cache = PlainCache((0, skipped))
    logits = [forward(model, padded[:, :_PLAIN_TOKENS], cache, 1)]
    logits += [forward(model, padded[:, i : i + 1], cache, 1) for i in range(_PLAIN_TOKENS, padded.shape[1] - 1)]
    cache = cache.select([1], torch.tensor([1], device=ids.device))
    last = forward(model, padded[1:, -1:], cache, 1)
    both = torch.cat(logits, dim=1)
    return max(_difference(both, torch.cat((full, alone))[:, :-1].float()), _difference(last, alone[:, -1:].float()))


def _difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits.float() - expected).abs().max())


def _raise_excess(model: Any, differences: dict[str, float], allowed: float) -> None:
    excess = [f"{check} {value:.1e}" for check, value in differences.items() if not value <= allowed]
    if excess:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits with its cache than without ({', '.join(excess)}, allowed "
            f"{allowed:.1e}): it is not a decoder, or its cache cannot be used; use another model"
        )
