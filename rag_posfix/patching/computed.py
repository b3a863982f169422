"""Checks of what transformers computes when it loads a model: no file holds it, and no loading report names it."""

from __future__ import annotations

import math
from typing import Any

import torch

from rag_posfix.errors import UnsupportedModelError


def check_computed(model: Any) -> None:
    """Compare the rotary frequencies and the scale of the embeddings with what the configuration says.

    A buffer that its module did not fill holds whatever was in that memory, another model at every load.

    Raises:
        UnsupportedModelError: they differ.
    """
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is not None:
        loaded = dict(rotary.named_buffers())
        for name, expected in type(rotary)(config=rotary.config).named_buffers():
            held = loaded[name]
            if not held.is_meta and not torch.allclose(held, expected.to(held), rtol=1e-5, atol=0):
                raise _not_computed(model, f"rotary_emb.{name}")
    for name, module in model.named_modules():
        expected = getattr(module, "scalar_embed_scale", None)
        if expected is not None and not math.isclose(float(module.embed_scale), expected, rel_tol=1e-2):  # bfloat16
            raise _not_computed(model, f"{name}.embed_scale")


def _not_computed(model: Any, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} was loaded with a {name} that is not what its configuration says: transformers left "
        "memory uninitialised; load it again, or with another version of transformers"
    )
