"""Batch invariance: an answer's numbers do not depend on how many other answers are decoded in the same pass.

Matrix products choose a kernel by their number of rows. One row takes another kernel than two or more on many
processors, whose sums round differently: in bfloat16 a greedy answer then changes with the load. The difference
is measured on the model itself. Where some number of rows ends it, passes with too few rows are padded
(``sequence_batch.forward_batches``). Where none does, as on some matrix units, the products of a decode pass are
computed in blocks of a constant number of rows: the shape in which a row is computed never changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

BatchInvariance = Literal["auto", "on", "blocks", "off"]

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)
"""Numbers of rows that are compared with each other: each side of the usual block sizes of matrix kernels."""

BLOCKS = (8, 16, 4, 32)
"""Numbers of rows of a block, in the order in which they are tried."""

MAX_OUTPUTS = 8192
"""Outputs of a layer that are computed: of a vocabulary only these, so that large models cost little time."""

_BLOCK: ContextVar[int | None] = ContextVar("rag_posfix_row_block", default=None)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PassRows:
    """In how many rows a decode pass is computed, so that its results equal those of any other pass.

    Attributes:
        least: Minimum of rows of a pass; the missing rows are padding.
        block: Rows of each block in which products are computed; None computes all rows at once.
    """

    least: int = 1
    block: int | None = None


ALL_ROWS = PassRows()
"""The rows that there are, all at once."""


def rows_for(setting: BatchInvariance, model: Any) -> PassRows:
    """Return the rows of shared decode passes for a setting; a model that needs blocks is prepared for them.

    ``auto`` is ``on`` in bfloat16 and float16 on CPUs. In float32 the rounding that is left, about 1e-6, changes a
    greedy answer only where two tokens are that near, and padding can double the time of a token; on GPUs the cost is
    not measured. ``on`` pads, and takes blocks where no padding helps; ``blocks`` always takes blocks.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if setting == "off" or (setting == "auto" and (devices != {"cpu"} or model.dtype.itemsize > 2)):
        return ALL_ROWS
    if setting != "blocks" and (rows := least_rows(model)) is not None:
        return PassRows(rows)
    block = block_rows(model)
    if block is None:
        _log.warning(
            "no number of rows up to %d and no block gives batch-invariant results on %s in %s: the last digits of an "
            "answer depend on how many are decoded together; max_concurrent=1 avoids that",
            ROW_COUNTS[-1],
            ", ".join(sorted(devices)),
            model.dtype,
        )
        return ALL_ROWS
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_in_blocks, layer)  # type: ignore[method-assign]
    return PassRows(block=block)


@contextmanager
def blocks_of(rows: int | None) -> Iterator[None]:
    """Compute the products of this thread in blocks of ``rows`` rows, by a model that ``rows_for`` prepared."""
    token = _BLOCK.set(rows)
    try:
        yield
    finally:
        _BLOCK.reset(token)


def _in_blocks(layer: nn.Linear, rows: Tensor) -> Tensor:
    compute, block = partial(type(layer).forward, layer), _BLOCK.get()
    if block is None:
        return compute(rows)
    flat = rows.reshape(-1, rows.shape[-1])
    parts = torch.split(nn.functional.pad(flat, (0, 0, 0, -len(flat) % block)), block)
    outputs = compute(parts[0]) if len(parts) == 1 else torch.cat([compute(part) for part in parts])
    return outputs[: len(flat)].view(*rows.shape[:-1], -1)


@torch.inference_mode()
def least_rows(model: Any) -> int | None:
    """Return the least number of rows from which on each row's result is independent of the number and its place.

    Measured, bit for bit, on one layer of each type and shape, products with rows and weights whose sums are rounding
    alone: ``ROW_COUNTS`` at the beginning and at the end of the largest of them. None if there is no such number.

    Cost: 260 rows through each shape once, and a weight of each shape.
    """
    rows = 1
    for layer, size in _layers(model):
        layer_rows = _least_rows(layer, size, model.dtype)
        if layer_rows is None:
            return None
        rows = max(rows, layer_rows)
    return rows


@torch.inference_mode()
def block_rows(model: Any) -> int | None:
    """Return a number of rows such that the place of a row in a block of them does not change its result.

    Measured as ``least_rows``, with each row at each place. Norms are not computed in blocks: their results must not
    depend on the number of rows. None if no number of ``BLOCKS`` has it.
    """
    for block in BLOCKS:
        if all(_ignores_place(layer, size, model.dtype, block) for layer, size in _layers(model)):
            return block
    return None


def _layers(model: Any) -> Iterator[tuple[nn.Module, int]]:
    """Yield one layer of each type and shape that reads full rows, products and norms, and the size of a row."""
    seen: set[tuple[object, ...]] = set()
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear):
            shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        elif weight is not None and weight.dim() == 1 and "Norm" in type(layer).__name__:
            shape = tuple(weight.shape)
        else:
            continue
        if (type(layer), *shape) not in seen:
            seen.add((type(layer), *shape))
            yield layer, shape[-1]


def _least_rows(layer: Any, size: int, dtype: torch.dtype) -> int | None:
    max_rows = ROW_COUNTS[-1]
    compute, rows = _trial(layer, size, dtype, max_rows)
    expected, least = compute(rows), None
    for count in reversed(ROW_COUNTS):
        first, last = compute(rows[:count]), compute(rows[max_rows - count :])
        if not (torch.equal(first, expected[:count]) and torch.equal(last, expected[max_rows - count :])):
            break
        least = count
    return least if least != max_rows else None


def _ignores_place(layer: Any, size: int, dtype: torch.dtype, block: int) -> bool:
    if not isinstance(layer, nn.Linear):
        return _least_rows(layer, size, dtype) == 1
    compute, rows = _trial(layer, size, dtype, block)
    rows = rows[:, 0]
    expected = compute(rows)
    return all(torch.equal(compute(rows.roll(shift, 0)), expected.roll(shift, 0)) for shift in range(1, block))


def _trial(layer: Any, size: int, dtype: torch.dtype, count: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return what a layer computes, and rows (count, 1, size) for it."""
    weight, generator = layer.weight, torch.Generator().manual_seed(0)
    rows = torch.randn((count, 1, size), generator=generator)
    compute = layer
    if type(layer) is nn.Linear:
        outputs = min(layer.out_features, MAX_OUTPUTS)
        rows, products = _cancelling(rows, outputs, generator)
        products = products.to(weight.device, weight.dtype)
        bias = None if layer.bias is None else torch.zeros_like(layer.bias[:outputs])
        compute = partial(nn.functional.linear, weight=products, bias=bias)
    return compute, rows.to(weight.device, dtype)


def _cancelling(rows: Tensor, outputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows and a weight (outputs, size) whose products cancel exactly, pair by pair, at distant places.

    What is left is the rounding of the sum alone, so that another order of summation shows in nearly every output.
    With a model's own weights it shows in one of 100,000, because the result is rounded to half precision.
    """
    half = rows.shape[-1] // 2
    places = torch.randperm(half, generator=generator)
    weight = torch.randn((outputs, rows.shape[-1]), generator=generator)
    weight[:, half : 2 * half] = -weight[:, :half][:, places]
    rows = rows.clone()
    rows[..., half : 2 * half] = rows[..., :half][..., places]
    weight[:, 2 * half :] = 0.0
    return rows, weight
