"""Every mitigation on the device: the CPU's log-probabilities, any order, and one wait for each token."""

import pytest
import torch

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.mitigations import MITIGATIONS
from tests.support.device_twin import DEVICE, Counts, counted
from tests.support.tiny import FAMILIES, toy_layout
from tests.support.twin_engines import TOLERANCE, tiny_engine_on

TOKENS = (5, 9, 11, 20)
LAYOUT = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
SHORT = {"passage_answers": {"answer_tokens": 4}}
INVARIANT = [name for name, method in MITIGATIONS.items() if method.order_invariant]


def choice(name: str) -> MitigationChoice:
    return MitigationChoice(name, {**MITIGATIONS.get(name).example, **SHORT.get(name, {})})


def log_probs(device: str, name: str, family: str = "llama", layout=LAYOUT, **settings: object) -> torch.Tensor:
    """Return the log-probabilities after the prompt and after each of ``TOKENS``, (5, V)."""
    session = tiny_engine_on(device, family, **settings).open(layout, choice(name), len(TOKENS) + 1)
    rows = [session.next_log_probs()]
    for token in TOKENS:
        session.advance(token)
        rows.append(session.next_log_probs())
    return torch.stack(rows)


def windowed_log_probs(device: str, name: str) -> torch.Tensor:
    """The same of a model whose layers forget what is more than 12 tokens back."""
    return log_probs(device, name, "mistral", sliding_window=12)


def steps(name: str, traced: bool) -> Counts:
    """Count what three tokens take after the first."""
    session = tiny_engine_on(DEVICE).open(LAYOUT, choice(name), 9)
    if traced:
        session.attribute_tokens()
    session.next_log_probs()
    with counted() as counts:
        for _ in range(3):
            session.advance(int(session.next_log_probs().argmax()))
    return counts


def reversed_difference(name: str) -> float:
    """Return the largest difference between two orders of the passages."""
    layouts = (LAYOUT, LAYOUT.select((3, 1, 2, 0)))
    first, second = (log_probs(DEVICE, name, layout=layout) for layout in layouts)
    return float((first - second).abs().max())


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_a_method_gives_on_the_device_what_it_gives_on_the_cpu(on_both, name):
    assert on_both(log_probs, name).difference <= TOLERANCE


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
def test_a_family_gives_on_the_device_what_it_gives_on_the_cpu(on_both, family):
    assert on_both(log_probs, "context_experts", family).difference <= TOLERANCE


@pytest.mark.parametrize("name", ["none", "context_experts", "passage_answers"])
def test_sliding_windows_give_on_the_device_what_they_give_on_the_cpu(on_both, name):
    assert on_both(windowed_log_probs, name).difference <= TOLERANCE


@pytest.mark.parametrize("name", INVARIANT)
def test_the_order_of_the_passages_changes_no_bit_on_the_device(on_twin, name):
    assert on_twin(reversed_difference, name) == 0.0


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_a_token_takes_one_wait_the_read_of_its_number(on_twin, name, traced):
    counts = on_twin(steps, name, traced)
    assert counts.reads == {"item": 3}
    assert counts.uploads == {}
