"""How often decoding makes the host wait for a GPU, counted on the CPU; and that the counter counts."""

import pytest
import torch

from benchmarks.gpu.parts import Synchronisations
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.batching.scheduler import advance_batch
from rag_posfix.generation.decode.answer_writer import Sampler, choose_together
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import MITIGATIONS
from tests.support.tiny import loaded_model, toy_layout
from tests.support.toy_encoder import ToyEncoder

STEPS = 3
LAYOUT = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))


@pytest.fixture(scope="module")
def engine():
    return Engine(loaded_model(vocab_size=ToyEncoder.vocab_size), ToyEncoder(), "tiny", "print")


def choice(name):
    return MitigationChoice(name, MITIGATIONS.get(name).example)


def counted(engine):
    return Synchronisations(engine.loaded.model)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_a_token_takes_one_synchronisation_the_read_of_its_number(engine, name, traced):
    request = GenerationRequest(LAYOUT, choice(name), sampling=Sampling(max_tokens=9), attribution=traced)
    session = engine.prefill(LAYOUT, engine.plan(LAYOUT, request.mitigation, 9))
    chunks = engine.resume(session, request)
    next(chunks)
    with counted(engine) as found:
        for _ in range(STEPS):
            session.advance(int(session.next_log_probs().argmax()))
    assert +found.counts == {"item": STEPS}


@pytest.mark.parametrize("name", ["none", "context_experts"])
def test_requests_together_take_one_read_and_one_upload_whatever_their_number(engine, name):
    sessions = [engine.open(LAYOUT, choice(name), 9) for _ in range(4)]
    samplers = [Sampler(Sampling())] * 4
    with counted(engine) as found:
        for _ in range(STEPS):
            advance_batch(sessions, choose_together(samplers, [one.next_log_probs() for one in sessions]))
    assert +found.counts == {"tolist": STEPS, "tensor from a list": STEPS}


@pytest.mark.slow
def test_reading_a_prompt_waits_no_more_often_in_a_deeper_model():
    """What waits once per layer keeps the device idle between the layers."""
    engines = [
        Engine(loaded_model(vocab_size=ToyEncoder.vocab_size, num_hidden_layers=n), ToyEncoder(), "tiny", "print")
        for n in (3, 6)
    ]
    for name in MITIGATIONS.names():
        counts = []
        for engine in engines:
            with counted(engine) as found:
                engine.open(LAYOUT, choice(name), 9)
            counts.append(+found.counts)
        assert counts[0] == counts[1], name


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("item", lambda x: x.sum().item()),
        ("item", lambda x: int(x.argmax())),
        ("item", lambda x: bool(x.any())),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu()),
        ("numpy", lambda x: x.numpy()),
        ("nonzero", lambda x: x.nonzero()),
        ("equal", lambda x: torch.equal(x, x)),
        ("boolean index", lambda x: x[x > 0]),
        ("masked_select", lambda x: x.masked_select(x > 0)),
        ("repeat_interleave", lambda x: torch.repeat_interleave(x.long())),
        ("tensor from a list", lambda x: torch.tensor([1, 2])),
        ("to a device", lambda x: x.to("cpu")),
        ("to a device", lambda x: x.to(device="cpu")),
    ],
)
def test_what_waits_is_counted(name, action):
    with Synchronisations(torch.nn.Linear(2, 2)) as found:
        action(torch.ones(3))
    assert found.counts[name] == 1


def test_what_does_not_wait_is_not_counted():
    model = torch.nn.Linear(2, 2)
    with Synchronisations(model) as found:
        x = torch.full((2, 2), 3.0)
        x = model(x).float().to(torch.bfloat16).argmax(-1)[None].expand(2, -1)[:, 0]
        model.weight.to("cpu")
    assert found.total == 0
