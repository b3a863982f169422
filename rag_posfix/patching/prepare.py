"""Prepares a loaded model: with the attention hook where that is listed or proved, as plain rows elsewhere."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching.families import FAMILIES, UNSUPPORTED
from rag_posfix.patching.install import install, uninstall
from rag_posfix.patching.plain import PlainForward
from rag_posfix.patching.spec import Family, ModelSpec, Ranks
from rag_posfix.patching.structure import read_structure
from rag_posfix.patching.verify import Verification, verify
from rag_posfix.patching.verify_plain import plain_shape, verify_plain

_log = logging.getLogger(__name__)


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
        verify_windows(model, spec)
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
    if implementation != "sdpa":
        raise UnsupportedModelError(f"its attention is {implementation}, and the hook computes as sdpa does")
    layers = DynamicCache(config=model.config).layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise UnsupportedModelError("some of its layers are recurrent and keep no keys")
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise UnsupportedModelError("its layers keep more than keys and values")
    spec = None
    try:
        spec = install(model, structure=read_structure(model))
        verify_windows(model, spec, thorough=True)
    except Exception as error:  # a model that fails in any way is read without the hook
        if spec is not None:
            uninstall(model, spec, implementation)
        raise UnsupportedModelError(" ".join(str(error).split())[:200]) from error
    return spec


def check_again(model: Any, spec: ModelSpec) -> Verification:
    """Return the results of every check on a prepared model, whatever they cost. Errors as those of ``prepare``."""
    if spec.plain is None:
        return verify_windows(model, spec, thorough=True)
    _, differences = verify_plain(model, spec.plain)
    return Verification(differences)


def verify_windows(model: Any, spec: ModelSpec, *, thorough: bool = False) -> Verification:
    """Verify a model with the hook, and where it has sliding windows, calls that fit them."""
    if spec.within is not None:
        verify(model, spec.within, thorough=thorough)
    return verify(model, spec, thorough=thorough)


def _no_angles(states: Tensor, positions: Tensor, base_factor: float | None = None) -> tuple[Tensor, Tensor]:
    raise UnsupportedModelError("a model without the attention hook has no angles; please report this")
