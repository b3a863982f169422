"""Snapshots of a model's whole cache, whatever its layers keep: keys, windows of keys, recurrent or compressed states.

A snapshot is one tensor of bytes: the length of a description, the description as JSON, the tensors. It is read by
length and type alone: nothing in it is executed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

_LENGTH_BYTES = 16
_ALIGNMENT = 16
_TOKENS = {"keys": 2, "values": 2, "indexer_keys": 1}
"""Tensor of a layer -> dimension that is the token: padded in front where rows have different lengths."""
_LENGTH = "cumulative_length"
"""What layers with windows call the number of tokens read."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}

_Value: TypeAlias = "Tensor | int | float | bool | None"
LayerState: TypeAlias = Mapping[tuple[str, str], _Value]
"""What a layer of a cache holds, by attribute, and by key where the attribute is a dictionary."""


class SnapshotError(Exception):
    """A cache cannot be saved, or a snapshot does not belong to it."""


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotForm:
    """The kind of cache that a model makes: saves caches as bytes, and fills new ones from bytes or other caches.

    Attributes:
        template: A cache of the model. Its layers lend their classes, and whatever is neither a tensor nor a number.
    """

    template: Cache

    @classmethod
    def of(cls, held: Any) -> SnapshotForm:
        """Return the kind of a cache of one row.

        Raises:
            SnapshotError: it is no cache of layers.
        """
        if not isinstance(held, Cache) or not held.layers:
            raise SnapshotError(f"a {type(held).__name__} has no layers")
        template = copy.copy(held)
        template.layers = [_emptied(layer) for layer in held.layers]
        return cls(template)

    @property
    def name(self) -> str:
        """What the layers keep; part of the keys of snapshots, so that those of other layers are not found."""
        layers = ((type(layer).__name__, sorted(vars(layer))) for layer in self.template.layers)
        return json.dumps(list(layers))

    def save(self, held: Any) -> Tensor:
        """Return the tensors and numbers of a cache of one row, (n,) uint8 on its device; a copy."""
        tensors: list[Tensor] = []
        layers = [_packed(_state_of(layer), tensors) for layer in held.layers]
        described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        header = json.dumps({"layers": layers, "tensors": described}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        start = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        device = tensors[0].device if tensors else torch.device("cpu")
        parts = [torch.frombuffer(bytearray(start), dtype=torch.uint8).to(device)]
        for tensor in tensors:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
            parts += [flat, flat.new_zeros(-len(flat) % _ALIGNMENT)]
        return torch.cat(parts)

    def fill(self, snapshots: Sequence[Tensor]) -> Cache:
        """Return a cache with a row for each snapshot; shorter rows are padded in front.

        Raises:
            SnapshotError: a snapshot is of another cache, or the rows do not fit into one.
        """
        return self._built([_unpacked(snapshot) for snapshot in snapshots])

    def join(self, caches: Sequence[Any]) -> Cache:
        """Return a cache with the rows of several, a copy. Padding and errors as those of ``fill``."""
        return self._built([[_state_of(layer) for layer in held.layers] for held in caches])

    def _built(self, rows: Sequence[Sequence[LayerState]]) -> Cache:
        cache = copy.copy(self.template)
        if any(len(row) != len(self.template.layers) for row in rows):
            raise SnapshotError("a snapshot has another number of layers")
        cache.layers = [
            _filled(layer, [row[index] for row in rows]) for index, layer in enumerate(self.template.layers)
        ]
        return cache


def _emptied(layer: Any) -> Any:
    """Return a copy of a layer that shares neither tensors nor dictionaries with it."""
    emptied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(emptied, name, {key: None if isinstance(each, Tensor) else each for key, each in value.items()})
        elif isinstance(value, Tensor) and value.ndim:
            setattr(emptied, name, None)
    return emptied


def _state_of(layer: Any) -> dict[tuple[str, str], _Value]:
    state: dict[tuple[str, str], _Value] = {}
    for name, value in vars(layer).items():
        entries = {str(key): each for key, each in value.items()} if isinstance(value, dict) else {"": value}
        for key, each in entries.items():
            if each is None or isinstance(each, bool | int | float) or (isinstance(each, Tensor) and each.ndim):
                state[name, key] = each
    return state


def _packed(state: LayerState, tensors: list[Tensor]) -> list[list[Any]]:
    """Return the state of a layer as JSON. Its tensors are added to ``tensors``; in place of each is [its number]."""
    packed: list[list[Any]] = []
    for (name, key), value in state.items():
        if isinstance(value, Tensor):
            index = next((i for i, tensor in enumerate(tensors) if _is_same(tensor, value)), len(tensors))
            if index == len(tensors):
                tensors.append(value)
            packed.append([name, key, [index]])
        else:
            packed.append([name, key, value])
    return packed


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory: some layers keep keys that are their values."""
    if not tensor.numel():
        return False
    same = tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype
    return same and tensor.shape == other.shape and tensor.stride() == other.stride()


def _unpacked(snapshot: Tensor) -> list[LayerState]:
    """Return the states of the layers of a snapshot, views of its bytes."""
    try:
        start = _LENGTH_BYTES + int.from_bytes(_bytes_of(snapshot[:_LENGTH_BYTES]), "little")
        header = json.loads(_bytes_of(snapshot[_LENGTH_BYTES:start]))
        tensors: list[Tensor] = []
        for dtype_name, shape in header["tensors"]:
            dtype = _DTYPES[dtype_name]
            n_bytes = prod(shape) * dtype.itemsize
            tensors.append(snapshot[start : start + n_bytes].view(dtype).reshape(shape))
            start += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return [
            {(name, key): tensors[value[0]] if isinstance(value, list) else value for name, key, value in layer}
            for layer in header["layers"]
        ]
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise SnapshotError(f"a snapshot cannot be read: {error}") from error


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


def _filled(template: Any, rows: Sequence[LayerState]) -> Any:
    """Return a layer like ``template`` that holds the states of several rows."""
    layer = copy.copy(template)
    for name, value in vars(template).items():
        if isinstance(value, dict):
            setattr(layer, name, dict(value))
    if any(row.keys() != rows[0].keys() for row in rows):
        raise SnapshotError("snapshots hold different states")
    for name, key in rows[0]:
        value = _joined(name, [row[name, key] for row in rows])
        held = vars(layer).get(name)
        if name not in vars(layer):
            raise SnapshotError(f"a {type(layer).__name__} has no {name}")
        if not isinstance(held, dict):
            setattr(layer, name, value)
            continue
        own = {str(each): each for each in held}
        if key not in own:
            raise SnapshotError(f"{name} of a {type(layer).__name__} has no {key}")
        held[own[key]] = value
    return layer


def _joined(name: str, values: Sequence[Any]) -> Any:
    """Return one value for several rows."""
    if not any(isinstance(value, Tensor) for value in values):
        if name == _LENGTH:
            return max(values)
        if any(value != values[0] for value in values):
            raise SnapshotError(f"{name} differs between rows")
        return values[0]
    if not all(isinstance(value, Tensor) for value in values):
        raise SnapshotError(f"{name} differs between rows")
    if (dimension := _TOKENS.get(name)) is not None and all(value.ndim == dimension + 2 for value in values):
        longest = max(value.shape[dimension] for value in values)
        values = [functional.pad(value, (0, 0, longest - value.shape[dimension], 0)) for value in values]
    if any(value.shape != values[0].shape for value in values):
        raise SnapshotError(f"{name} has other sizes in other rows")
    return torch.cat(list(values))
