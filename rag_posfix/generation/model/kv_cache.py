"""The KV cache: buffers with spare capacity at the end, so that a new token costs its own copy and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE_TOKENS = 64
"""Minimum spare capacity of a buffer, in tokens."""

GROWTH = 8
"""A full buffer grows by 1 / GROWTH of its length: on average each token is copied at most GROWTH times."""


class GrowingLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of ``GrowingCache``. ``keys`` and ``values`` are views of what is filled: (R, Hkv, T, D)."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append tokens and return all: views of the buffers, which stay valid until the next update."""
        stop = self.length + key_states.shape[2]
        self._reserve(key_states, value_states, stop)
        if self._keys is None or self._values is None:  # _reserve made them
            raise RuntimeError("a cache layer has no buffers after it reserved them; please report this")
        self._keys[:, :, self.length : stop] = key_states
        self._values[:, :, self.length : stop] = value_states
        self.length = stop
        self.keys, self.values = self._keys[:, :, :stop], self._values[:, :, :stop]
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Take buffers whose first ``length`` tokens are filled."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._keys, self._values, self.length = keys, values, length
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def branch(self) -> GrowingLayer:
        """Return a layer on the same buffers that continues independently from here."""
        layer = GrowingLayer()
        if self._keys is not None and self._values is not None:
            layer.fill(self._keys, self._values, self.length)
        return layer

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1  # no bound

    def _reserve(self, key_states: Tensor, value_states: Tensor, length: int) -> None:
        if self._keys is not None and self._values is not None and length <= self._keys.shape[2]:
            return
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        capacity = length + max(SPARE_TOKENS, length // GROWTH)
        rows, heads, _, channels = key_states.shape
        keys = key_states.new_empty((rows, heads, capacity, channels))
        values = value_states.new_empty((rows, heads, capacity, value_states.shape[3]))
        if self._keys is not None and self._values is not None:
            keys[:, :, : self.length] = self._keys[:, :, : self.length]
            values[:, :, : self.length] = self._values[:, :, : self.length]
        self._keys, self._values = keys, values


class GrowingCache(Cache):  # type: ignore[misc]
    """The KV cache of a batch, for models that keep all keys in every layer."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[GrowingLayer() for _ in range(n_layers)])

    def branch(self) -> GrowingCache:
        """Return a cache that continues independently from here, on the same buffers; nothing is copied.

        It is valid until this one, or another branch of it, is updated.
        """
        branched = GrowingCache(0)
        branched.layers = [layer.branch() for layer in self.layers if isinstance(layer, GrowingLayer)]
        return branched

    def copy(self, length: int, rows: Tensor | None = None) -> GrowingCache:
        """Return an independent cache that holds the first ``length`` tokens of all rows, or of some."""
        copied = GrowingCache(len(self.layers))
        for old, new in zip(self.layers, copied.layers, strict=True):
            keys, values = old.keys[:, :, :length], old.values[:, :, :length]
            new.update(*((keys, values) if rows is None else (keys[rows], values[rows])))
        return copied

    @staticmethod
    def over(buffers: Tensor, length: int) -> GrowingCache:
        """Return a cache on buffers whose first ``length`` tokens are filled.

        Shapes:
            buffers: (2, L, R, Hkv, capacity, D): keys and values of all layers.
        """
        cache = GrowingCache(buffers.shape[1])
        for layer, keys, values in zip(cache.layers, buffers[0], buffers[1], strict=True):
            layer.fill(keys, values, length)
        return cache


class ConcatenatedCache(Cache):  # type: ignore[misc]
    """The KV caches of several batches in one forward pass: each batch's new tokens go to its own cache.

    The attention hook reads the batches' own caches: ``update`` returns only the new tokens. Rows beyond the batches
    are padding, which no cache keeps.

    ``counts`` are the rows of each batch, then the rows of padding, if there are any.
    """

    def __init__(self, caches: Sequence[GrowingCache], counts: Sequence[int]) -> None:
        super().__init__(layers=[GrowingLayer()])  # empty: its length is the number of new tokens
        self._caches = list(caches)
        self._counts = list(counts)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append each batch's new tokens to its cache; return the new tokens."""
        keys, values = torch.split(key_states, self._counts), torch.split(value_states, self._counts)
        for cache, key, value in zip(self._caches, keys, values, strict=False):
            cache.layers[layer_idx].update(key, value)
        return key_states, value_states


def cache_bytes(caches: Sequence[Cache]) -> int:
    """Return the bytes of the buffers of KV caches; caches that share buffers count them once."""
    storages = {}
    for layer in (layer for cache in caches for layer in cache.layers):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
