"""Every method on a GPU against the CPU in float32: the first part of ``python -m benchmarks.gpu``.

Without a GPU the same comparison runs between float32 and bfloat16 on the CPU, so that it cannot rot.
"""

import pytest
import torch

from benchmarks.gpu.models import REAL
from benchmarks.gpu.parts import Exactness, kernel
from rag_posfix.mitigations import MITIGATIONS, create

METHODS = MITIGATIONS.names()
INVARIANT = [name for name, method in MITIGATIONS.items() if method.order_invariant]
MODELS = {model.name: model for model in REAL.exact}
NO_GPU = "torch sees no CUDA device"


@pytest.fixture(scope="module")
def on_the_cpu():
    return Exactness(REAL.exact[0], torch.device("cpu"))


@pytest.fixture(scope="module", params=MODELS)
def on_the_gpu(request):
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return Exactness(MODELS[request.param], torch.device("cuda"))


def served(exactness, name):
    refusal = create(name, MITIGATIONS.get(name).example).refusal(exactness.shape)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_in_bfloat16_is_near_float32(on_the_cpu, name):
    found = on_the_cpu.method(name)
    assert found["passed"], found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_idle_hook_changes_no_bit(on_the_cpu, dtype):
    assert on_the_cpu.idle(dtype)["identical"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_idle_hook_changes_no_bit_on_a_gpu(on_the_gpu, dtype):
    assert on_the_gpu.idle(dtype)["identical"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_on_a_gpu_what_it_gives_on_the_cpu(on_the_gpu, name):
    served(on_the_gpu, name)
    found = on_the_gpu.method(name)
    assert found["passed"], found


@pytest.mark.gpu
@pytest.mark.parametrize("name", INVARIANT)
def test_every_order_of_four_passages_gives_the_same_on_a_gpu(on_the_gpu, name):
    served(on_the_gpu, name)
    found = on_the_gpu.orders(name)
    assert found["passed"], found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_query", [300, 40, 1])
def test_the_fused_kernels_of_a_gpu_give_the_same_output_and_log_sum_exp(dtype, n_query):
    found = kernel(torch.device("cuda"), dtype, n_query, 300)
    assert found["passed"], found
