"""Batch invariance: an answer's numbers must not depend on how many other answers are decoded in the same pass.

Matrix products choose a kernel by their number of rows. One row takes another kernel than two or more on many
processors, whose sums round differently: in bfloat16 a greedy answer then changes with the load. The difference
is measured on the model itself, and passes with too few rows are padded (``sequence_batch.forward_batches``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

BatchInvariance = Literal["auto", "on", "off"]

ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)
"""Numbers of rows that are compared with each other: each side of the usual block sizes of matrix kernels."""

MAX_OUTPUTS = 8192
"""Outputs of a layer that are computed: of a vocabulary only these, so that large models cost little time."""

_log = logging.getLogger(__name__)


def rows_for(setting: BatchInvariance, model: Any) -> int:
    """Return how many rows every shared decode pass must have for a setting: 1 where nothing is padded.

    ``auto`` pads in bfloat16 and float16 on CPUs. In float32 the rounding that is left, about 1e-6, changes a greedy
    answer only where two tokens are that near, and padding can double the time of a token; on GPUs the cost is not
    measured.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if setting == "off" or (setting == "auto" and (devices != {"cpu"} or model.dtype.itemsize > 2)):
        return 1
    rows = least_rows(model)
    if rows is None:
        _log.warning(
            "no number of rows up to %d gives batch-invariant results on %s in %s: the last digits of an answer "
            "depend on how many are decoded together; max_concurrent=1 avoids that",
            ROW_COUNTS[-1],
            ", ".join(sorted(devices)),
            model.dtype,
        )
    return rows or 1


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
    weight, max_rows = layer.weight, ROW_COUNTS[-1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((max_rows, 1, size), generator=generator)
    compute = layer
    if type(layer) is nn.Linear:
        outputs = min(layer.out_features, MAX_OUTPUTS)
        rows, products = _cancelling(rows, outputs, generator)
        products = products.to(weight.device, weight.dtype)
        bias = None if layer.bias is None else torch.zeros_like(layer.bias[:outputs])

        def compute(rows: Tensor) -> Tensor:
            return nn.functional.linear(rows, products, bias)

    rows = rows.to(weight.device, dtype)
    expected, least = compute(rows), None
    for count in reversed(ROW_COUNTS):
        first, last = compute(rows[:count]), compute(rows[max_rows - count :])
        if not (torch.equal(first, expected[:count]) and torch.equal(last, expected[max_rows - count :])):
            break
        least = count
    return least if least != max_rows else None


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
