"""The device twin keeps a GPU's rules: what a GPU refuses is refused, and what waits for it is counted."""

import pytest
import torch

from tests.support.device_twin import DEVICE, Counts, DeviceMismatch, counted

WORK = {
    "item": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "a comparison": lambda x: torch.equal(x, x),
    "a boolean index": lambda x: x[x > 1],
    "repeats on the device": lambda x: torch.repeat_interleave(x.long()),
    "setting the CPU": lambda x: torch.zeros(3).__setitem__(slice(0, 2), x[:2]),
    "a list": lambda x: torch.tensor([1, 2], device=DEVICE),
    "from the CPU": lambda x: torch.ones(2).to(DEVICE),
    "an index on the CPU": lambda x: x[[0, 2]],
    "two more": lambda x: (x + x) * 2,
    "a number of the CPU": lambda x: x + torch.tensor(1.0),
    "filling": lambda x: torch.full((2,), 3.0, device=DEVICE),
}
MIXED = {
    "adding": lambda x, y: x + y,
    "a product": lambda x, y: x @ y,
    "joining": lambda x, y: torch.cat((x, y)),
    "indexing the CPU": lambda x, y: y[x.long()],
    "attention": lambda x, y: torch.nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
}


def numbers(device: str) -> torch.Tensor:
    return torch.tensor([0.0, 1.0, 2.0], device=device)


def counts_of(name: str) -> Counts:
    device_numbers = numbers(DEVICE)
    with torch.inference_mode(), counted() as counts:
        WORK[name](device_numbers)
    return counts


def refusal(name: str) -> str:
    try:
        MIXED[name](numbers(DEVICE), numbers("cpu"))
    except DeviceMismatch as error:
        return str(error)
    return ""


def numpy_refusal() -> str:
    try:
        numbers(DEVICE).numpy()
    except TypeError as error:
        return str(error)
    return ""


def process_facts() -> tuple[str, bool]:
    return str(numbers(DEVICE).device), "twin" in str(type(numbers("cpu"))).lower()


def test_the_device_is_known_in_its_own_process_alone(on_twin):
    assert on_twin(process_facts) == ("twin:0", False)
    with pytest.raises(RuntimeError, match="twin"):
        torch.device("twin")


@pytest.mark.parametrize("name", MIXED)
def test_operands_on_two_devices_are_refused(on_twin, name):
    assert "twin:0" in on_twin(refusal, name)


def test_numpy_is_refused(on_twin):
    assert "use .cpu() first" in on_twin(numpy_refusal)


@pytest.mark.parametrize("name", list(WORK)[:8])
def test_what_reads_the_device_is_counted(on_twin, name):
    counts = on_twin(counts_of, name)
    assert counts.reads.total() == 1
    assert counts.waits == 1


@pytest.mark.parametrize("name", list(WORK)[8:11])
def test_what_uploads_is_counted(on_twin, name):
    counts = on_twin(counts_of, name)
    assert counts.uploads.total() == 1
    assert counts.waits == 1


@pytest.mark.parametrize(("name", "calls"), [("two more", 2), ("a number of the CPU", 1), ("filling", 2)])
def test_what_waits_for_nothing_counts_as_calls_alone(on_twin, name, calls):
    counts = on_twin(counts_of, name)
    assert counts.waits == 0
    assert counts.calls.total() == calls
