"""The device twin: tensors that say they are on ``twin:0`` and compute on the CPU, by the rules of a GPU.

Operands on two devices are an error, ``numpy()`` of a device tensor is an error, and whatever makes the host wait for
a GPU is counted. So every path that a GPU takes can be run on a machine without one. Kernels, streams and memory are
the CPU's: the twin says nothing about them.

Works through torch's Python backend for the device type PrivateUse1 and a wrapper subclass whose
``__torch_dispatch__`` runs each operator on the CPU tensor inside. ``install`` changes the whole process for good:
call it in a process that runs nothing else, as the fixture ``on_twin`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from rag_posfix.attention.masks import LSE_KERNELS

DEVICE = "twin:0"
NAME = "twin"

aten: Any = torch.ops.aten
INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
READING = {
    aten._local_scalar_dense.default: "item",
    aten.is_nonzero.default: "bool",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "equal",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten._unique2.default: "unique",
    aten.unique_dim.default: "unique",
}
"""Operators whose result, or its size, the host has to know."""

FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m")
"""Operators without tensors that torch does not hand to a backend's fallback."""


class DeviceMismatch(RuntimeError):
    """Operands on two devices: a GPU raises RuntimeError."""


@dataclass(frozen=True)
class Counts:
    """What the host asked of the device.

    Attributes:
        calls: Operators, by name; views too. A GPU launches at most as many kernels.
        reads: Values that the host waited for, by what read them.
        uploads: Copies from the CPU to the device, by what copied them. From memory that is not pinned, they wait too.
    """

    calls: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)

    @property
    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.reads.total() + self.uploads.total()

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.calls - other.calls, self.reads - other.reads, self.uploads - other.uploads)

    def copy(self) -> Counts:
        return Counts(self.calls.copy(), self.reads.copy(), self.uploads.copy())


TOTAL = Counts()


@contextmanager
def counted() -> Iterator[Counts]:
    """Yield counts of what happens inside of the block; they are filled when it ends."""
    before, result = TOTAL.copy(), Counts()
    yield result
    difference = TOTAL - before
    result.calls.update(difference.calls)
    result.reads.update(difference.reads)
    result.uploads.update(difference.uploads)


class TwinTensor(Tensor):
    """A tensor on the twin. ``inner`` is the CPU tensor that it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> TwinTensor:
        with torch.inference_mode(False):  # views of an inference tensor made here would have no version counter
            made: TwinTensor = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=torch.device(DEVICE),
            )
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self, *_: Any) -> str:
        return f"TwinTensor({self.inner!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU tensors inside of its arguments, after checking where these are."""
    if func.overloadpacket in (aten.to, aten.item):
        return func.decompose(*args, **kwargs)
    TOTAL.calls[str(func)] += 1
    if func in (aten.copy_.default, aten._to_copy.default):
        return COPIES[func](*args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    twins = [value for value in flat if isinstance(value, TwinTensor)]
    others = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, TwinTensor)]
    if func in INDEXING:
        count_indices(args[0], args[1])
        others = [value for value in others if value is args[0]]
    if twins and (wrong := [tuple(tensor.shape) for tensor in others if tensor.dim()]):
        shapes = [tuple(tensor.shape) for tensor in twins]
        raise DeviceMismatch(f"{func}: operands on {DEVICE}, {shapes}, and on the CPU, {wrong}")
    if func in READING:
        TOTAL.reads[READING[func]] += 1
    inner_args, inner_kwargs = tree_unflatten([inner_of(value) for value in flat], spec)
    inner_kwargs.pop("pin_memory", None)
    out = func(*inner_args, **inner_kwargs)
    if any(result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns):
        given = {id(tensor.inner): tensor for tensor in twins}  # in place, or out=: the tensor that was given
        return tree_map(lambda value: given.get(id(value), value), out)
    device = kwargs.get("device")
    return tree_map(on_twin, out) if (bool(twins) if device is None else is_twin(device)) else out


def count_indices(indexed: Tensor, indices: Any) -> None:
    """Count what indexing waits for: masks, whose true elements are counted, and indices on the CPU."""
    for index in indices:
        if isinstance(index, TwinTensor) and index.dtype is torch.bool:
            TOTAL.reads["boolean index"] += 1
        elif isinstance(index, Tensor) and not isinstance(index, TwinTensor) and isinstance(indexed, TwinTensor):
            TOTAL.uploads["index on the CPU"] += 1


def copy_into(target: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    """``copy_``, which may cross devices."""
    count_crossing(isinstance(source, TwinTensor), isinstance(target, TwinTensor), source)
    inner_of(target).copy_(inner_of(source))
    return target


def to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    """``_to_copy``, which may cross devices."""
    there = isinstance(source, TwinTensor) if device is None else is_twin(device)
    count_crossing(isinstance(source, TwinTensor), there, source)
    options.pop("pin_memory", None)
    copied: Tensor = aten._to_copy.default(inner_of(source), **options)
    return TwinTensor(copied) if there else copied


COPIES = {aten.copy_.default: copy_into, aten._to_copy.default: to_copy}


def count_crossing(from_twin: bool, to_twin: bool, source: Tensor) -> None:
    if from_twin and not to_twin:
        TOTAL.reads["copy to the CPU"] += 1
    elif to_twin and not from_twin and source.numel():
        TOTAL.uploads["copy from the CPU"] += 1


def inner_of(value: Any) -> Any:
    """Return the CPU tensor of a tensor on the twin, the CPU for its device, and everything else as it is."""
    if isinstance(value, TwinTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def on_twin(value: Any) -> Any:
    return TwinTensor(value) if isinstance(value, Tensor) and not isinstance(value, TwinTensor) else value


def is_twin(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``scaled_dot_product_attention``, which knows no kernel for the twin; with a gradient the one spelled out."""
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    if not all(isinstance(tensor, TwinTensor) for tensor in tensors):
        raise DeviceMismatch(f"scaled_dot_product_attention: operands on {[str(tensor.device) for tensor in tensors]}")
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    with torch._C.DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            if attn_mask is not None and attn_mask.dtype is torch.bool:
                attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, float("-inf"))
            return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, **options)[0]
        TOTAL.calls["scaled_dot_product_attention"] += 1
        inner = [inner_of(tensor) for tensor in (query, key, value, attn_mask)]
        return TwinTensor(torch.nn.functional.scaled_dot_product_attention(*inner, **options))


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention with the log-sum-exp, one call as on a GPU."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scaling)
    return out, lse


def to_list(tensor: TwinTensor) -> Any:
    TOTAL.reads["tolist"] += 1
    return tensor.inner.tolist()


def to_numpy(*_: Any, **__: Any) -> Any:
    raise TypeError(f"can't convert a {DEVICE} tensor to numpy; use .cpu() first")


def get_item(tensor: Tensor, index: Any) -> Any:
    """``tensor[index]``: lists are indices on the CPU."""
    if not isinstance(tensor, TwinTensor):
        raise DeviceMismatch(f"a CPU tensor indexed by a {DEVICE} tensor")
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.__getitem__(tensor, with_tensors(index))


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    """``tensor[index] = value``; a CPU tensor may be set to values of the device, which copies them."""
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(tensor, TwinTensor):
            Tensor.__setitem__(tensor, with_tensors(index), value)
            return
        TOTAL.reads["CPU tensor set"] += 1
        Tensor.__setitem__(tensor, tree_map(inner_of, index), inner_of(value))


def with_tensors(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(with_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


def new_tensor(like: Tensor, data: Any, **options: Any) -> Tensor:
    return torch.tensor(data, **{"dtype": like.dtype, "device": like.device, **options})


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attend,
    Tensor.tolist: to_list,
    Tensor.numpy: to_numpy,
    Tensor.__array__: to_numpy,
    Tensor.__getitem__: get_item,
    Tensor.__setitem__: set_item,
    Tensor.new_tensor: new_tensor,
    Tensor.data_ptr: lambda tensor: tensor.inner.data_ptr(),
    Tensor.untyped_storage: lambda tensor: tensor.inner.untyped_storage(),
}
"""What is taken over before torch sees it."""


class Backend(backend_registration._DummyBackendModule):
    """What ``torch.twin`` offers."""

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        """Leave the generator alone: it is the CPU's."""

    def synchronize(self, device: Any = None) -> None:
        """Return at once: every operator has run."""

    def empty_cache(self) -> None:
        """Return at once: nothing is kept."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def install() -> None:
    """Make the device known to torch, in this process and for good; call once, before anything makes a model."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(lambda func, *args, **kwargs: run_operator(func, args, kwargs), "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        library.impl(name, factory(name), "PrivateUse1")
    LSE_KERNELS[NAME] = attend_with_lse  # as a GPU has one
    LIBRARIES.extend((fallback, library))
    _device_constructors()  # keeps torch.tensor as it is now: else `with torch.device("meta")` would not reach it
    torch.tensor, torch.as_tensor = made_on_cpu(torch.tensor), made_on_cpu(torch.as_tensor)


LIBRARIES: list[Any] = []
"""What torch forgets when it is collected."""


def factory(name: str) -> Callable[..., Tensor]:
    base, _, overload = name.partition(".")
    func = getattr(getattr(aten, base), overload or "default")

    def make(*args: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
        TOTAL.calls[str(func)] += 1
        return TwinTensor(func(*args, dtype=dtype, device="cpu"))

    return make


def made_on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.tensor`` that makes tensors of the twin on the CPU and moves them."""

    def made(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, TwinTensor) or (device is not None and is_twin(device)):
            on_cpu = make(inner_of(data), *args, device="cpu", **options)
            return on_cpu.to(device or DEVICE)
        return make(data, *args, device=device, **options)

    return made
