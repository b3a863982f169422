"""Soft caps and sinks through the hook: models whose own attention is eager, which is the oracle."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.attention.masks import causal_rows
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.patching.attention_hook import ForwardContext, Observer, Overrides, active
from rag_posfix.patching.install import check_again, prepare
from rag_posfix.plan.plan import Capability
from tests.support.attention_hook import attention_of
from tests.support.tiny import toy_layout
from tests.support.toy_encoder import ToyEncoder

MODELS = ("gemma2", "gpt_oss", "vaultgemma")
OWN_ATTENTION = {
    "blended", "calibrated_attention", "inter_document", "parallel_encoding", "parallel_windows", "shifted_rotary",
    "sorted_inter_document", "stable_mask",
}  # fmt: skip


def config_of(model_type, **changes):
    """Caps of 2 and sinks of about 1, so that leaving them out changes the logits of a random model."""
    caps = {} if model_type == "gpt_oss" else {"attn_logit_softcapping": 2.0}
    return tiny_config(model_type, {"sliding_window": 64, **caps, **changes})


def stock_of(model_type, **changes):
    model = tiny_model(config_of(model_type, **changes))
    if attention_of(model) != "eager":
        pytest.skip(f"this release of transformers runs {model_type} by sdpa, which leaves its caps out")
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.data += 1.0
        layer.self_attn.q_proj.weight.data *= 8  # scores of the size of the caps
    return model


def opened(model_type, **changes):
    model = stock_of(model_type, **changes)
    return Engine(LoadedModel(model, prepare(model)), ToyEncoder(), model_type, model_type)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    return opened(request.param), stock_of(request.param)


def test_the_hook_is_proved_and_says_what_the_softmax_is(pair):
    spec = pair[0].loaded.spec
    assert (spec.unhooked, spec.is_listed, spec.attention, spec.family.softmax) == (None, False, "eager", False)
    assert spec.structure["plain_softmax"] is False
    assert check_again(pair[0].loaded.model, spec).idle_difference == 0.0


@torch.inference_mode()
def test_idle_it_is_the_stock_model_bit_for_bit(pair):
    engine, stock = pair
    ids = torch.tensor([[*toy_layout((20, 30, 20)).token_ids]])  # beyond the windows
    assert torch.equal(engine.loaded.model(ids).logits, stock(ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.loaded.model.generate(ids, **options), stock.generate(ids, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", MODELS)
def test_in_sixteen_bits_it_is_proved_too(model_type, dtype):
    model = stock_of(model_type).to(dtype)
    assert prepare(model).unhooked is None


@torch.inference_mode()
def test_a_long_prompt_is_read_in_blocks_of_queries(monkeypatch):
    from rag_posfix.patching import attention_hook

    engine, layout = opened("gemma2"), toy_layout()
    choices = [MitigationChoice(name) for name in ("none", "set_prompting")]  # masks of the model and of a plan
    at_once = [engine.open(layout, choice, 4).next_log_probs() for choice in choices]
    monkeypatch.setattr(attention_hook, "EAGER_ROWS", 7)
    for choice, expected in zip(choices, at_once, strict=True):
        assert float((engine.open(layout, choice, 4).next_log_probs() - expected).abs().max()) < 1e-5


@torch.inference_mode()
def test_a_cap_or_a_sink_counts(pair):
    engine, _ = pair
    ids = torch.tensor([toy_layout().token_ids])
    model_type = engine.model_id
    other = stock_of(model_type, **({} if model_type == "gpt_oss" else {"attn_logit_softcapping": None}))
    for layer in other.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.data -= 30.0
    assert float((engine.loaded.model(ids).logits - other(ids).logits).abs().max()) > 1e-2


@torch.inference_mode()
def test_prompts_and_steps_have_the_logits_of_eager_attention(pair):
    engine, stock = pair
    layout, tokens = toy_layout(), (5, 9, 11)
    logits = stock(torch.tensor([[*layout.token_ids, *tokens]]), use_cache=False).logits[0].log_softmax(-1)
    session = engine.open(layout, MitigationChoice("none"), 4)
    for step, token in enumerate(tokens):
        expected = logits[len(layout.token_ids) - 1 + step]
        assert float((session.next_log_probs() - expected).abs().max()) < 1e-4
        session.advance(token)


@pytest.mark.slow
def test_methods_of_masks_and_positions_are_order_free_within_the_windows(pair):
    engine, _ = pair
    within = engine.loaded.spec.windowed.shape
    names = [name for name, cls in MITIGATIONS.items() if cls.order_invariant and cls().refusal(within) is None]
    assert {"set_prompting", "context_experts", "canonical_rotations"} <= set(names)
    for name in names:
        found = []
        for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 7):
            layout = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3)).select(order)
            found.append(engine.open(layout, MitigationChoice(name), 4).next_log_probs())
        assert all(float((each - found[0]).abs().max()) < 1e-4 for each in found), name


@torch.inference_mode()
def test_a_mask_through_the_hook_is_that_mask_in_eager_attention(pair):
    engine, stock = pair
    ids = torch.tensor([toy_layout().token_ids])
    n_tokens = ids.shape[1]
    index = torch.arange(n_tokens)

    def mask(query, key):
        return (key <= query) & ((key < 5) | (key // 8 == query // 8) | (query >= n_tokens - 6))

    with active(ForwardContext(Overrides(mask=mask), index[None].float(), engine.loaded.spec, starts=(0,))):
        planned = engine.loaded.model(ids).logits
    blocked = torch.zeros(1, 1, n_tokens, n_tokens).masked_fill(
        ~mask(index[:, None], index[None, :]), torch.finfo(torch.float32).min
    )
    expected = stock(ids, attention_mask=blocked).logits
    assert float((planned - expected).abs().max()) < 1e-4
    assert float((planned - stock(ids).logits).abs().max()) > 1e-3


@torch.inference_mode()
def test_observed_attention_is_that_of_eager_attention(pair):
    engine, stock = pair
    ids = torch.tensor([toy_layout().token_ids])
    expected = torch.stack(
        [weights[0, :, -3:].mean(dim=(0, 1)) for weights in stock(ids, output_attentions=True).attentions]
    )
    observer = Observer(queries=3)
    with active(ForwardContext(observer=observer)):
        engine.loaded.model(ids)
    assert torch.allclose(observer.mean()[0], expected.mean(dim=0), atol=1e-5)
    by_head = Observer(heads={1: (3, 0)})
    with active(ForwardContext(observer=by_head)):
        engine.loaded.model(ids)
    last = stock(ids, output_attentions=True).attentions[1][0, [3, 0], -1]
    assert torch.allclose(by_head.by_head[1][0], last, atol=1e-5)


def test_methods_with_attention_of_their_own_are_refused_with_the_reason(pair):
    engine, _ = pair
    reason = "caps its attention scores or has sinks"
    assert {name for name, cls in MITIGATIONS.items() if Capability.SOFTMAX in cls.requires} == OWN_ATTENTION
    for name in OWN_ATTENTION:
        with pytest.raises(UnsupportedModelError, match=reason):
            engine.open(toy_layout(), MitigationChoice(name, MITIGATIONS.get(name).example), 4)


def test_a_model_that_fails_gets_its_eager_attention_back(monkeypatch):
    from rag_posfix.patching import attention_hook

    monkeypatch.setattr(attention_hook, "causal_rows", lambda *arguments: causal_rows(*arguments).logical_not())
    model = stock_of("gemma2")
    assert "differs from native" in prepare(model).unhooked.reason
    assert attention_of(model) == "eager"


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["llama", "cohere", "cohere2", "glm4", "smollm3", "gpt_oss"])
def test_another_base_turns_as_the_model_does_with_that_base(model_type):
    """Families lay out their angles in halves, in pairs, or once; a layer without rotation keeps none."""
    windows = {} if model_type in ("llama", "cohere", "glm4", "smollm3") else {"sliding_window": 128}
    rope = tiny_config(model_type).rope_parameters | {"rope_type": "default"}
    models = [
        tiny_model(tiny_config(model_type, {**windows, "rope_parameters": {**rope, "rope_theta": theta}}))
        for theta in (1e4, 3e4)
    ]
    spec = prepare(models[0])
    ids = torch.tensor([toy_layout().token_ids])
    positions = torch.arange(ids.shape[1]).float()[None]
    with active(ForwardContext(Overrides(rope_base_factor=3.0), positions, spec)):
        planned = models[0](ids).logits
    assert float((planned - models[1](ids).logits).abs().max()) < 1e-4
