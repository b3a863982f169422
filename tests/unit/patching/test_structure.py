"""Which models are refused, as a whole or by a method, and what the refusal says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.patching.install import install, verify
from rag_posfix.patching.structure import (
    FAMILIES,
    UNSUPPORTED,
    devices_of,
    family_of,
    main_device,
    original_window_of,
    shape_of,
)
from rag_posfix.plan.plan import Capability
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import COMMON, loaded_model, stock_model, toy_layout

GPT2_SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50}
SLIDING = "has sliding-window layers, whose caches drop keys"
NEIGHBOURS = "pairs neighbouring channels when it rotates"


def small(name, **settings):
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def shape(name, **settings):
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings})
    return shape_of(config, family_of(config))


@dataclasses.dataclass(frozen=True)
class Needy(Mitigation):
    """A method that needs whatever it is told to."""

    name = "needy"
    requires = frozenset(Capability)

    def plan(self, layout, model):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Bloom", {"n_layer": 1, "n_head": 2, "hidden_size": 16, "vocab_size": 50}, "it has ALiBi biases instead of"),
        ("Mpt", {"n_layers": 1, "n_heads": 2, "d_model": 16, "vocab_size": 50}, "it has ALiBi biases instead of"),
        ("GPT2", GPT2_SIZES, "it adds positions to its input and rotates nothing"),
        (
            "OPT",
            {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "ffn_dim": 16,
             "word_embed_proj_dim": 16, "vocab_size": 50},
            "it adds positions to its input and rotates nothing",
        ),
        ("GPTJ", {**GPT2_SIZES, "rotary_dim": 4}, "it rotates inside of its attention modules"),
        (
            "GPTNeoX",
            {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16,
             "vocab_size": 50},
            "its attention modules are not at model.layers[i].self_attn",
        ),
        ("Mamba", {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 50}, "it has no attention that keeps"),
    ],
)  # fmt: skip
def test_a_family_that_cannot_be_served_is_refused_with_the_reason_and_left_alone(name, settings, reason):
    model = small(name, **settings)
    before = attention_of(model)
    with pytest.raises(UnsupportedModelError) as caught:
        install(model)
    start = f"model type {model.config.model_type!r} is not supported: {reason}"
    assert str(caught.value).startswith(start)
    assert "; supported: cohere, gemma, gemma3_text, " in str(caught.value)
    assert attention_of(model) == before
    assert count_hooks(model) == 0


def test_a_family_that_nobody_has_checked_is_refused_by_name():
    config = transformers.PersimmonConfig(**COMMON)
    with pytest.raises(UnsupportedModelError, match="'persimmon' is not supported, nobody has checked it"):
        family_of(config)


def test_no_family_is_both_served_and_refused_and_every_refused_one_exists():
    assert not FAMILIES.keys() & UNSUPPORTED.keys()
    assert UNSUPPORTED.keys() <= set(transformers.CONFIG_MAPPING.keys())


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("Mistral", {"sliding_window": 8}, f"mistral {SLIDING}"),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, f"gemma3_text {SLIDING}"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, f"qwen2 {SLIDING}"),
        ("Phi3", {"sliding_window": 8}, f"phi3 {SLIDING}"),
    ],
)
def test_a_sliding_window_is_named_where_a_method_needs_all_keys(name, settings, reason):
    found = shape(name, **settings)
    assert Capability.FULL_CACHE not in found.capabilities
    assert create("parallel_windows").refusal(found) == (
        f"parallel_windows needs full_cache, which this model does not offer: {reason}"
    )
    with pytest.raises(UnsupportedModelError, match=SLIDING):
        create("parallel_windows").checked_plan(None, found)
    for method in ("none", "context_experts"):
        assert create(method).refusal(found) is None


@pytest.mark.parametrize(
    ("name", "settings", "lacks"),
    [
        ("Llama", {}, {}),
        ("Qwen3", {"head_dim": 16}, {"hidden_channel": "qwen3 normalises queries and keys"}),
        ("Cohere", {}, {"rotation": f"cohere {NEIGHBOURS}", "hidden_channel": f"cohere {NEIGHBOURS}"}),
        ("Glm4", {"head_dim": 8}, {"rotation": f"glm4 {NEIGHBOURS}", "hidden_channel": f"glm4 {NEIGHBOURS}"}),
        (
            "Gemma3Text",
            {"head_dim": 16, "sliding_window": 8},
            {
                "full_cache": f"gemma3_text {SLIDING}",
                "angles": "gemma3_text rotates by two sets of angles",
                "rotation": "gemma3_text rotates by two sets of angles",
                "hidden_channel": "gemma3_text rotates by two sets of angles",
            },
        ),
    ],
)
def test_every_capability_that_is_missing_has_its_reason(name, settings, lacks):
    found = shape(name, **settings)
    assert found.lacks.keys() == set(lacks)
    assert found.capabilities == set(Capability) - set(lacks)
    for capability, reason in lacks.items():
        assert found.lacks[capability].startswith(reason)


def test_a_refusal_names_the_method_what_it_needs_and_each_reason_once():
    found = shape("Cohere")
    assert Needy().refusal(found) == (
        "needy needs hidden_channel, rotation, which this model does not offer: cohere pairs neighbouring channels "
        "when it rotates, the hook first with second half"
    )
    assert Needy().refusal(dataclasses.replace(found, lacks={})) == (
        "needy needs hidden_channel, rotation, which this model does not offer"
    )
    assert Needy().refusal(shape("Llama")) is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mistral", {"sliding_window": 512}),
        ("Phi3", {"sliding_window": 1024}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}),
    ],
)
def test_a_sliding_window_as_long_as_the_context_window_drops_no_keys(name, settings):
    found = shape(name, **settings)
    assert found.context_window == 512
    assert found.capabilities == set(Capability)
    assert Capability.FULL_CACHE not in shape(name, **{**settings, "sliding_window": 511}).capabilities


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_are_decided_by_the_whole_call_cost_no_method(rope_type):
    half = COMMON["hidden_size"] // COMMON["num_attention_heads"] // 2
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    config = transformers.LlamaConfig(**{**COMMON, "rope_parameters": rope})
    assert shape_of(config, FAMILIES["llama"]).lacks == {}
    assert original_window_of(config) == (128 if rope_type == "longrope" else None)


# What a loaded model lacks because of how its weights are held.


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
