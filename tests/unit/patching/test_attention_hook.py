"""The attention hook: idle it is the stock model, active it does what the plan says, wrong rotations are found."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from rag_posfix.attention.rope import add_rotation
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import create
from rag_posfix.patching.attention_hook import LayerRotation
from rag_posfix.patching.install import ATTENTION_NAME, install, stock_copy, verify
from rag_posfix.plan.plan import Capability, Plan, RowPlan
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import COMMON, FAMILIES, loaded_model, stock_model, toy_layout

IDS = torch.tensor([toy_layout().token_ids])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idle_the_model_is_bit_identical_with_and_without_padding(family, dtype):
    stock, loaded = stock_model(family).to(dtype), loaded_model(family)
    loaded.model.to(dtype)
    padding = torch.ones_like(IDS)
    padding[:, :3] = 0
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS).logits, stock(IDS).logits)
        padded = [model(IDS, attention_mask=padding).logits for model in (loaded.model, stock)]
    assert torch.equal(*padded)
    assert set(loaded.model.state_dict()) == set(stock.state_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_idle_generation_is_token_identical(family):
    stock, loaded = stock_model(family), loaded_model(family)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(loaded.model.generate(IDS, **options), stock.generate(IDS, **options))


def test_verify_refuses_a_model_whose_rotation_is_not_what_the_table_says():
    config = transformers.CohereConfig(**COMMON)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    spec = install(model)
    assert Capability.ROTATION not in spec.shape.capabilities  # interleaved: the table knows
    verify(model, spec)
    lying = dataclasses.replace(
        spec, shape=dataclasses.replace(spec.shape, capabilities=spec.shape.capabilities | {Capability.ROTATION})
    )
    with pytest.raises(UnsupportedModelError, match="CohereForCausalLM differs from native by"):
        verify(model, lying)


def test_weights_that_compute_nan_are_named_as_such_not_as_a_wrong_hook():
    loaded = loaded_model()
    with torch.no_grad():
        loaded.model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="computes logits that are not finite, also without"):
        verify(loaded.model, loaded.spec)


@pytest.mark.parametrize(
    ("name", "settings", "windows"),
    [
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, False),
        ("Glm4", {"head_dim": 8}, True),
        ("Cohere", {}, True),
    ],
)
def test_families_whose_rotation_is_not_ours_run_the_methods_that_leave_it_alone(name, settings, windows):
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    spec = install(model)
    assert verify(model, spec).idle_difference == 0.0
    assert Capability.ROTATION not in spec.shape.capabilities
    assert (create("parallel_windows").refusal(spec.shape) is None) is windows
    layout = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3))
    for method in ("none", "context_experts", *(["parallel_windows"] if windows else [])):
        running = Session(LoadedModel(model, spec), layout, create(method).checked_plan(layout, spec.shape))
        at_once, stepwise = running.score([5, 9, 11]), []
        for token in (5, 9, 11):
            stepwise.append(float(running.next_log_probs()[token]))
            running.advance(token)
        assert at_once == pytest.approx(stepwise, abs=1e-5)


def divide(heads):
    """Return a head scale that divides the positions of each key head, the same in every layer."""
    return lambda layer, query, key: torch.tensor(heads)


def divided(heads):
    return Session(loaded_model(), toy_layout(), Plan(rows=(RowPlan(head_scale=divide(heads)),)))


def test_dividing_the_positions_of_all_heads_alike_is_dividing_all_positions():
    layout = toy_layout()
    positions = torch.arange(len(layout.token_ids)).float()[None] / 2
    halves = Session(loaded_model(), layout, Plan(rows=(RowPlan(positions=positions),)))
    twos = divided([2.0, 2.0])
    assert float((halves.next_log_probs() - twos.next_log_probs()).abs().max()) < 1e-5


def test_the_divisor_of_a_head_reaches_that_head():
    base = divided([1.0, 1.0]).next_log_probs()
    found = {tuple(heads): divided(heads).next_log_probs() for heads in ([1.0, 2.0], [2.0, 1.0])}
    assert all(float((base - other).abs().max()) > 1e-4 for other in found.values())
    assert float((found[1.0, 2.0] - found[2.0, 1.0]).abs().max()) > 1e-4


@pytest.fixture(scope="module")
def spelled_out():
    """The tiny model, 8 query heads to 2 key heads, with a key head of its own, the same, for each query head."""
    grouped, whole = loaded_model(), loaded_model(num_key_value_heads=8)
    weights = grouped.model.state_dict()
    for name in [name for name in weights if name.endswith(("k_proj.weight", "v_proj.weight"))]:
        weights[name] = weights[name].view(2, 8, -1).repeat_interleave(4, dim=0).flatten(0, 1)
    whole.model.load_state_dict(weights)
    return whole


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("none", {}),
        ("shifted_rotary", {"threshold": 9, "window": 3}),
        ("sorted_inter_document", {}),
        ("inter_document", {}),
        ("parallel_windows", {"windows": 2}),
        ("parallel_encoding", {}),
        ("hidden_scaling", {"channel": 3}),
        ("multi_base", {"factors": [1.9]}),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_query_head_h_uses_the_rotation_of_key_head_h_over_the_group_size(method, parameters, scaled, spelled_out):
    def said(loaded, heads):
        layout = toy_layout()
        plan = create(method, parameters).checked_plan(layout, loaded.spec.shape)
        if scaled:
            plan = dataclasses.replace(
                plan, rows=(dataclasses.replace(plan.rows[0], head_scale=divide(heads)),), independent_passages=False
            )
        running, found = Session(loaded, layout, plan), []
        for token in (5, 9, 11):
            found.append(running.next_log_probs())
            running.advance(token)
        return torch.stack(found)

    grouped = said(loaded_model(), [1.3, 2.2])
    assert float((grouped - said(spelled_out, [1.3] * 4 + [2.2] * 4)).abs().max()) < 1e-5
    if scaled:
        assert float((grouped - said(spelled_out, [1.3, 2.2] * 4)).abs().max()) > 1e-3


def test_positions_and_divisors_of_two_key_heads_are_those_of_four_query_heads_each():
    # Positions 6 and 4 of the key heads, divided by 2 and 4: 3 and 1.
    spec = loaded_model().spec
    states = torch.randn(1, 8, 1, 8, generator=torch.Generator().manual_seed(0))
    expected = LayerRotation(spec)(states, torch.tensor([3.0] * 4 + [1.0] * 4)[None, :, None])
    divisors = LayerRotation(spec, ratios=torch.tensor([2.0, 4.0]))
    assert torch.equal(divisors(states, torch.tensor([[[6.0], [4.0]]])), expected)
    assert torch.equal(LayerRotation(spec)(states, torch.tensor([[[3.0], [1.0]]])), expected)
    turned = add_rotation(states, LayerRotation(spec).phases(torch.tensor([[[3.0], [1.0]]])))
    torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)
    phases = divisors.phases(torch.tensor([[6.0]]))  # 6 / 2 and 6 / 4
    assert torch.equal(phases, LayerRotation(spec).phases(torch.tensor([[[3.0], [1.5]]])))


def test_keys_are_rotated_once_and_kept_rotated():
    running = divided([1.5, 2.0])
    whole = Session(loaded_model(), toy_layout(), Plan(rows=(RowPlan(head_scale=divide([1.5, 2.0])),)))
    assert running.score((5, 9, 11)) == pytest.approx([step(whole, token) for token in (5, 9, 11)], abs=1e-5)


def step(session, token):
    found = float(session.next_log_probs()[token])
    session.advance(token)
    return found


def test_installing_twice_is_refused():
    loaded = loaded_model()
    with pytest.raises(UnsupportedModelError, match="has the attention hook already"):
        install(loaded.model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_copy_shares_the_weights_and_has_neither_hooks_nor_attention_hook(family):
    loaded = loaded_model(family)
    twin = stock_copy(loaded.model, loaded.spec)
    assert (attention_of(twin), attention_of(loaded.model)) == ("sdpa", ATTENTION_NAME)
    assert count_hooks(twin) == 0
    assert all(count_hooks(layer.self_attn) for layer in loaded.model.model.layers)
    own = {parameter.data_ptr() for parameter in loaded.model.parameters()}
    assert {parameter.data_ptr() for parameter in twin.parameters()} == own
    with torch.inference_mode():
        assert torch.equal(twin(IDS).logits, stock_model(family)(IDS).logits)
