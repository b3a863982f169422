"""What a loaded model lacks because of how its weights are held."""

import pytest
import torch

from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.patching.install import install, verify
from rag_posfix.patching.structure import devices_of, main_device
from rag_posfix.plan.plan import Capability
from tests.support.tiny import loaded_model, stock_model, toy_layout


def log_probs(loaded, name):
    method = create(name, MITIGATIONS.get(name).example)
    session = Session(loaded, toy_layout(), method.checked_plan(toy_layout(), loaded.spec.shape))
    session.advance(5)
    return session.next_log_probs()


@pytest.fixture
def spread_out():
    """A model whose map says that its layers are on several devices; on a machine without any, all are on the CPU."""
    model = stock_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    return LoadedModel(model, install(model))


def test_a_model_on_several_devices_offers_positions_and_its_softmax_and_says_why(spread_out):
    assert spread_out.spec.shape.capabilities == {Capability.POSITIONS, Capability.SOFTMAX}
    reason = create("inter_document").refusal(spread_out.spec.shape)
    assert "its layers are on several devices (0, 1, cpu); load it on one" in reason


def test_what_a_model_on_several_devices_still_runs_gives_what_it_gives_on_one(spread_out):
    verify(spread_out.model, spread_out.spec)
    whole = loaded_model()
    served = [name for name in MITIGATIONS.names() if create(name).refusal(spread_out.spec.shape) is None]
    assert {"none", "context_experts", "passage_answers"} <= set(served)
    for name in ("none", "context_experts"):
        assert torch.allclose(log_probs(spread_out, name), log_probs(whole, name), atol=1e-5), name


def test_a_map_to_one_device_changes_nothing():
    model = stock_model()
    model.hf_device_map = {"": "cpu"}
    assert install(model).shape == loaded_model().spec.shape


class Packed(torch.nn.Linear):
    """Weights as 4-bit checkpoints hold them: under another name, or as whole numbers."""

    def __init__(self, held, name):
        super().__init__(held.in_features, held.out_features, bias=False)
        self.held = held
        del self.weight
        if name is not None:
            setattr(self, name, torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False))

    def forward(self, states):
        return self.held(states)


@pytest.mark.parametrize("name", ["weight", "qweight", None])
def test_no_channel_is_read_from_quantised_weights_and_all_else_runs(name):
    model = stock_model()
    model.model.layers[1].self_attn.k_proj = Packed(model.model.layers[1].self_attn.k_proj, name)
    loaded = LoadedModel(model, install(model))
    refused = {name for name in MITIGATIONS.names() if create(name).refusal(loaded.spec.shape) is not None}
    assert refused == {"hidden_scaling"}
    assert "its weights are quantised" in create("hidden_scaling").refusal(loaded.spec.shape)
    assert torch.allclose(log_probs(loaded, "inter_document"), log_probs(loaded_model(), "inter_document"), atol=1e-5)


@pytest.mark.parametrize(
    ("placed", "device"),
    [({"a": 1, "b": "cpu"}, "cuda:1"), ({"a": "disk", "b": "cuda:0"}, "cuda:0"), ({"a": "disk"}, "cpu"), ({}, "cpu")],
)
def test_tokens_go_to_a_device_that_computes_where_the_first_weights_wait_elsewhere(placed, device):
    model = type("Model", (), {"device": torch.device("meta"), "hf_device_map": placed})()
    assert main_device(model) == torch.device(device)


def test_devices_are_named_once():
    assert devices_of(type("Model", (), {"hf_device_map": {"a": 0, "b": 0, "c": "cpu"}})()) == ("0", "cpu")
    assert devices_of(object()) == ()
