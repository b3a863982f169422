"""Which models are refused, as a whole or by a method, and what the refusal says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.mitigations import create
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.patching.install import install
from rag_posfix.patching.structure import FAMILIES, UNSUPPORTED, family_of, original_window_of, shape_of
from rag_posfix.plan.plan import Capability
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import COMMON

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
