"""The attention hook: idle it is the stock model, active it does what the plan says, wrong rotations are found."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.attention.masks import causal_rows
from rag_posfix.attention.rope import add_rotation
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.patching.attention_hook import (
    ForwardContext,
    LayerRotation,
    Observer,
    Overrides,
    active,
    channel_columns,
)
from rag_posfix.patching.install import ATTENTION_NAME, check_again, install, prepare, stock_copy, verify
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.plan import Capability, Plan, RowPlan
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import COMMON, FAMILIES, loaded_model, stock_model, toy_layout
from tests.support.toy_encoder import ToyEncoder

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


# Soft caps and sinks through the hook: models whose own attention is eager, which is the oracle.


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


# What a rank asks of the others, without others; several ranks are in the integration tests.


class Two(Ranks):
    """The first of two ranks; the other has the same numbers, a hundred higher."""

    def __init__(self):
        super().__init__(count=2)

    def gather(self, own, size, dim):
        return own if own.shape[dim] == size else torch.cat((own, own + 100), dim=dim)


class Share:
    """The rows of a weight that are here, as a DTensor has them."""

    dtype = torch.float32

    def __init__(self, rows):
        self.rows = rows

    def is_floating_point(self):
        return True

    def to_local(self):
        return self.rows


def test_alone_nobody_is_asked():
    alone, values, heads = Ranks(), torch.arange(6.0).view(1, 3, 2), torch.arange(3.0)
    alone.wait()
    assert alone.mean(values) is values
    assert alone.broadcast_decision(values) is values
    assert alone.gather(values, 3, 1) is values
    assert alone.own_heads(heads, 3) is heads


def test_each_rank_takes_its_own_heads_out_of_all():
    values = torch.arange(6.0)
    assert [Ranks(3, rank).own_heads(values, 2).tolist() for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_channel_of_projections_that_are_split_is_that_of_the_heads_that_are_here():
    """Llama's way: two of four query heads and one of two key heads, of two channels each; hidden channel 1."""
    query, key = torch.arange(8.0).view(4, 2), torch.arange(4.0).view(2, 2)
    module = SimpleNamespace(
        head_dim=2, q_proj=SimpleNamespace(weight=Share(query)), k_proj=SimpleNamespace(weight=Share(key))
    )
    columns = channel_columns(module, 1, 2, 1, Two())
    assert [column.tolist() for column in columns] == [[[1, 3], [5, 7]], [[1, 3]]]


def test_a_channel_of_a_projection_that_is_gathered_is_that_of_all_heads():
    """Phi3's way: queries, keys and values in one weight of two ranks with two rows each, heads of one channel.

    All rows of channel 0: 0, 2 here and 100, 102 there; two query heads, one key head, one value head.
    """
    module = SimpleNamespace(head_dim=1, qkv_proj=SimpleNamespace(weight=Share(torch.arange(4.0).view(2, 2))))
    query, key = channel_columns(module, 0, 2, 1, Two())
    assert (query.tolist(), key.tolist()) == ([[0], [2]], [[100]])
