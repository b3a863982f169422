"""Prepares a loaded model: with the attention hook where that is listed or proved, as plain rows elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import FAMILIES, UNSUPPORTED, main_device
from rag_posfix.patching.install import HOOKED, install, uninstall
from rag_posfix.patching.plain import KeptKeys, PlainCache, PlainForward
from rag_posfix.patching.snapshots import SnapshotError, SnapshotForm
from rag_posfix.patching.spec import Family, ModelSpec, Ranks
from rag_posfix.patching.structure import read_structure
from rag_posfix.patching.verify import Verification, verify
from rag_posfix.plan.plan import Capability, ModelShape

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
            plain=forward,
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
    if spec.plain is None:
        return verify(model, spec, thorough=True)
    _, differences = verify_plain(model, spec.plain)
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
