"""Runs a command with bfloat16 layers multiplied in float32: ``python -m benchmarks.widened eval positions ...``.

For CPUs without bfloat16 instructions, where PyTorch's own bfloat16 multiplication is slower by several times. The
instructions add exact products of bfloat16 numbers in float32 and round the sum; so does this, from a float32 copy of
each weight, and differs in the order of the sum only. Everything else stays bfloat16: what is measured is the bfloat16
model. Memory: four bytes more per parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from rag_posfix.cli.main import main


@contextmanager
def widened_linear() -> Iterator[None]:
    """While this is open, bfloat16 ``nn.Linear`` layers multiply in float32 and round what comes out; no gradients."""
    stock = nn.Linear.forward
    wide: WeakKeyDictionary[nn.Linear, Tensor] = WeakKeyDictionary()

    def forward(layer: nn.Linear, hidden: Tensor) -> Tensor:
        if layer.weight.dtype is not torch.bfloat16:
            return stock(layer, hidden)
        if layer not in wide:
            wide[layer] = layer.weight.detach().float()
        bias = None if layer.bias is None else layer.bias.float()
        return functional.linear(hidden.float(), wide[layer], bias).to(torch.bfloat16)

    with patch.object(nn.Linear, "forward", forward):
        yield


if __name__ == "__main__":
    with widened_linear():
        main(sys.argv[1:])
