"""Counts how often a piece of work makes the host wait for the device, on a GPU and, by the same rule, on a CPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = dict.fromkeys(("item", "__int__", "__float__", "__bool__", "__index__"), "item")
_READS.update(tolist="tolist", cpu="cpu", numpy="numpy")
"""Methods of tensors that read values, which a dispatch mode does not see everywhere."""

_aten: Any = torch.ops.aten
_WAITING = {
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.equal.default: "equal",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
    _aten.unique_dim.default: "unique",
    _aten._unique2.default: "unique",
}
"""Operations that make the host wait for a result or its size."""


class Synchronisations:
    """Counts inside of a ``with`` block, on any device, what would make the host wait for a GPU.

    Counted are values that are read (``item``, ``tolist``, ``cpu``, comparisons and sizes that depend on values) and
    uploads: tensors that are made from Python lists, and ``to`` with a device, which copies if the tensor is
    elsewhere. A CPU cannot tell whether it would, so every such call counts but those of ``model``'s own tensors.
    ``counts`` are by name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.counts: Counter[str] = Counter()
        on_device = frozenset(_storage(tensor) for tensor in chain(model.parameters(), model.buffers()))
        self._modes: tuple[Any, ...] = (_Functions(self.counts, on_device), _Operations(self.counts))
        self._entered = ExitStack()

    @property
    def total(self) -> int:
        """Return the sum of the counts."""
        return self.counts.total()

    def __enter__(self) -> Synchronisations:
        for mode in self._modes:
            self._entered.enter_context(mode)
        return self

    def __exit__(self, *_error: Any) -> None:
        self._entered.close()


class _Functions(TorchFunctionMode):
    """Counts what is called from Python."""

    def __init__(self, counts: Counter[str], on_device: frozenset[int]) -> None:
        super().__init__()
        self._counts, self._on_device = counts, on_device

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], Tensor):
            self._counts[_READS[name]] += 1
        elif func is torch.tensor:
            self._counts["tensor from a list"] += 1
        elif name == "to" and (_names_device(args[1:]) or "device" in options):
            self._counts["to a device"] += _storage(args[0]) not in self._on_device
        return func(*args, **options)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, those inside of other calls included."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _WAITING:
            self._counts[_WAITING[func]] += 1
        elif func in (_aten.index.Tensor, _aten.index_put_.default) and any(map(_is_mask, args[1])):
            self._counts["boolean index"] += 1
        return func(*args, **(kwargs or {}))


def count_synchronisations(action: Callable[[], object], model: torch.nn.Module, device: torch.device) -> int:
    """Return how often an action makes the host wait: by torch's warnings on a GPU, else by ``Synchronisations``."""
    if device.type != "cuda":
        with Synchronisations(model) as counted:
            action()
        return counted.total
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in warned)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _names_device(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, str | torch.device) for argument in arguments)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype is torch.bool
