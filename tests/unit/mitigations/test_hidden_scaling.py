"""hidden_scaling against the paper's computation done plainly: scaled inputs to the model's own projections."""

from __future__ import annotations

import pytest
import torch

from rag_posfix.attention.rope import rotate_half_split
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.decode.answer_writer import Session
from rag_posfix.mitigations import create
from rag_posfix.mitigations.hidden_scaling import default_layers
from rag_posfix.plan.plan import Capability, HiddenScale, Plan, RowPlan
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout

LINEAR = [name for name in FAMILIES if Capability.HIDDEN_CHANNEL in loaded_model(name).spec.shape.capabilities]
CHANNEL, FACTOR, FIRST = 7, -3.0, 1
TOKENS = (5, 9, 11, 20)


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


def projected(module, states, size):
    """Queries and keys (1, H, T, D) of the module's own projections, and its values."""
    if hasattr(module, "qkv_proj"):
        heads, kv_heads = module.config.num_attention_heads, module.config.num_key_value_heads
        parts = module.qkv_proj(states).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    else:
        parts = module.q_proj(states), module.k_proj(states), module.v_proj(states)
    return [part.view(*states.shape[:2], -1, size).transpose(1, 2) for part in parts]


def edited_attention(module, n_prompt):
    """The forward of an attention module as the paper has it, over a whole sequence without a cache."""

    def forward(hidden_states, position_embeddings, **_):
        size, length = module.head_dim, hidden_states.shape[1]
        scaled = hidden_states.clone()
        if module.layer_idx >= FIRST:
            scaled[..., CHANNEL] *= FACTOR
        _, _, value = projected(module, hidden_states, size)
        cos, sin = (part[:, None] for part in position_embeddings)
        results = []
        for states in (hidden_states, scaled):
            query, key, _ = projected(module, states, size)
            if getattr(module, "use_rope", True):
                query, key = (rotate_half_split(part, cos, sin) for part in (query, key))
            groups = query.shape[1] // key.shape[1]
            scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * module.scaling
            ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)
            results.append((weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).flatten(2))
        ordinary, edited = results
        newest = torch.arange(length)[None, :, None] >= n_prompt - 1
        return module.o_proj(torch.where(newest, edited, ordinary)), None

    return forward


def plainly(family, layout, tokens):
    """Log-probabilities after the prompt and after each token, (1 + tokens, V)."""
    model = stock_model(family)
    for layer in model.model.layers:
        layer.self_attn.forward = edited_attention(layer.self_attn, len(layout.token_ids))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*layout.token_ids, *tokens]]), use_cache=False).logits[0]
    return logits[len(layout.token_ids) - 1 :].log_softmax(dim=-1)


def planned(layout, shape):
    parameters = {"channel": CHANNEL, "factor": FACTOR, "first_layer": FIRST, "last_layer": shape.n_layers - 1}
    return create("hidden_scaling", parameters).plan(layout, shape)


@pytest.mark.parametrize("family", LINEAR)
def test_it_is_the_paper_s_computation(family):
    loaded, layout = loaded_model(family), toy_layout()
    expected = plainly(family, layout, TOKENS)
    running = Session(loaded, layout, planned(layout, loaded.spec.shape))
    unmodified = Session(loaded, layout, Plan())
    for step, token in enumerate(TOKENS):
        assert float((running.next_log_probs() - expected[step]).abs().max()) < 1e-5, step
        assert float((unmodified.next_log_probs() - expected[step]).abs().max()) > 1e-4, step
        running.advance(token)
        unmodified.advance(token)
    assert float((running.next_log_probs() - expected[-1]).abs().max()) < 1e-5


@pytest.mark.parametrize("family", LINEAR)
def test_tokens_that_are_scored_at_once_are_each_the_newest(family):
    loaded, layout = loaded_model(family), toy_layout()
    expected = plainly(family, layout, TOKENS)
    found = Session(loaded, layout, planned(layout, loaded.spec.shape)).score(TOKENS)
    assert found == pytest.approx([float(expected[i, token]) for i, token in enumerate(TOKENS)], abs=1e-5)


def test_a_prompt_of_one_token_is_the_newest():
    loaded, layout = loaded_model(), toy_layout((), prefix=0, suffix=1)
    assert len(layout.token_ids) == 1
    found = Session(loaded, layout, planned(layout, loaded.spec.shape))
    expected = plainly("llama", layout, TOKENS)
    for step, token in enumerate(TOKENS):
        assert float((found.next_log_probs() - expected[step]).abs().max()) < 1e-5
        found.advance(token)


@pytest.mark.parametrize("family", LINEAR)
def test_the_mechanism_at_factor_one_is_the_unmodified_model(family):
    # The method plans nothing there; the mechanism itself runs the last token apart and may round differently.
    loaded, layout = loaded_model(family), toy_layout()
    scaled = Session(loaded, layout, Plan(rows=(RowPlan(hidden_scale=HiddenScale(CHANNEL, 1.0, range(1, 3))),)))
    plain = Session(loaded, layout, Plan())
    for token in TOKENS:
        assert float((scaled.next_log_probs() - plain.next_log_probs()).abs().max()) < 1e-5
        scaled.advance(token)
        plain.advance(token)


@pytest.mark.parametrize(
    ("n_layers", "first", "last"),
    [(32, 10, 25), (30, 9, 23), (40, 12, 31), (3, 0, 1), (1, 0, 0)],  # 10 * 30 / 32 = 9.4; 26 * 30 / 32 = 24.4
)
def test_the_layers_are_the_paper_s_at_the_same_depth(n_layers, first, last):
    assert default_layers(n_layers) == range(first, last + 1)


def scale(shape, **parameters):
    (row,) = create("hidden_scaling", parameters).plan(toy_layout(), shape).rows
    return row.hidden_scale


def test_the_plan_holds_what_was_asked_for(llama):
    found = scale(llama.spec.shape, channel=5, factor=-1, first_layer=1, last_layer=2)
    assert (found.channel, found.factor, found.layers) == (5, -1.0, range(1, 3))
    found = scale(llama.spec.shape, channel=5)
    assert (found.factor, found.layers) == (0.0, range(2))
    assert scale(llama.spec.shape, channel=5, last_layer=0).layers == range(1)
    assert scale(llama.spec.shape, channel=63, first_layer=2, last_layer=2).layers == range(2, 3)


def test_without_a_channel_it_says_how_to_get_one(llama):
    with pytest.raises(ConfigError, match=r"channel=None .* rag-posfix probe positional-dimensions --out DIR finds"):
        create("hidden_scaling").plan(toy_layout(), llama.spec.shape)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"channel": 64}, "channel=64 must be below 64"),
        ({"channel": 3, "last_layer": 3}, "layers 0 to 3 must be within 0 to 2"),
        ({"channel": 3, "first_layer": 2}, "layers 2 to 1 must be within 0 to 2"),
        ({"channel": 64, "factor": 1.0}, "channel=64 must be below 64"),
    ],
)
def test_what_the_model_does_not_have_is_refused_when_planning(llama, parameters, message):
    with pytest.raises(ConfigError, match=message):
        create("hidden_scaling", parameters).plan(toy_layout(), llama.spec.shape)


def test_the_first_layer_is_no_later_than_the_last():
    with pytest.raises(ConfigError, match="first_layer=2 must not exceed last_layer=1"):
        create("hidden_scaling", {"first_layer": 2, "last_layer": 1})


def test_weights_that_are_quantized_are_refused_instead_of_misread():
    loaded, layout = loaded_model(), toy_layout()
    projection = loaded.model.model.layers[1].self_attn.k_proj
    whole = projection.weight
    del projection.weight
    projection.weight = whole.detach().to(torch.int8)
    projection.forward = lambda states: torch.nn.functional.linear(states, whole)
    with pytest.raises(UnsupportedModelError, match=r"holds its weights as torch.int8, .* without quantization"):
        Session(loaded, layout, planned(layout, loaded.spec.shape))
