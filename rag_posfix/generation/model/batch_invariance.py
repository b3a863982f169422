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

    Measured, bit for bit, on one layer of each type and shape with random rows: ``ROW_COUNTS`` at the beginning and at
    the end of the largest of them. None if there is no such number.

    Cost: 260 rows through each shape once; SmolLM2-135M in float32 on one core 0.24 s.
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
    weight = layer.weight
    cut = type(layer) is nn.Linear and layer.out_features > MAX_OUTPUTS
    bias = None if not cut or layer.bias is None else layer.bias[:MAX_OUTPUTS]

    def compute(rows: Tensor) -> Tensor:
        out: Tensor = nn.functional.linear(rows, weight[:MAX_OUTPUTS], bias) if cut else layer(rows)
        return out

    max_rows = ROW_COUNTS[-1]
    rows = torch.randn((max_rows, 1, size), generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    expected, least = compute(rows), None
    for count in reversed(ROW_COUNTS):
        first, last = compute(rows[:count]), compute(rows[max_rows - count :])
        if not (torch.equal(first, expected[:count]) and torch.equal(last, expected[max_rows - count :])):
            break
        least = count
    return least if least != max_rows else None
