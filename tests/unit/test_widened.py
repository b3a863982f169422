import pytest
import torch
from torch import nn

from benchmarks.widened import widened_linear


@pytest.mark.parametrize("bias", [True, False])
def test_a_bfloat16_layer_gives_the_exact_sum_rounded_once(bias):
    torch.manual_seed(0)
    layer = nn.Linear(256, 64, bias=bias, dtype=torch.bfloat16)
    hidden = torch.randn(3, 5, 256, dtype=torch.bfloat16)
    exact = hidden.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    with torch.no_grad(), widened_linear():
        found = layer(hidden)
    assert found.dtype is torch.bfloat16
    # Half a unit in the last of eight places, and what the float32 sum may be off by.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.001, atol=1e-5)


def test_other_layers_and_layers_afterwards_are_the_stock_ones():
    torch.manual_seed(0)
    single, half = nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.bfloat16)
    hidden = torch.randn(7, 64)
    with torch.no_grad():
        stock = single(hidden), half(hidden.bfloat16())
        with widened_linear():
            assert torch.equal(single(hidden), stock[0])
        assert torch.equal(half(hidden.bfloat16()), stock[1])
