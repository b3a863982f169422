"""Models outside the table of families: the hook where every check passes, plain prompts elsewhere, or a refusal."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import PromptTooLongError, UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.patching.install import check_again, install, prepare
from rag_posfix.patching.structure import read_structure
from rag_posfix.plan.plan import Capability
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import toy_layout
from tests.support.toy_encoder import ToyEncoder

PLAIN_METHODS = ("none", "context_experts", "canonical_rotations", "committee", "passage_answers")


def opened(model_type, **changes):
    model = tiny_model(tiny_config(model_type, changes))
    return Engine(LoadedModel(model, prepare(model)), ToyEncoder(), model_type, model_type)


def log_probs(engine, name, order=(0, 1, 2, 3)):
    layout = toy_layout(relevance=(0.9, 0.2, 0.4, 0.3)).select(order)
    return engine.open(layout, MitigationChoice(name), 4).next_log_probs()


@pytest.mark.parametrize(
    ("model_type", "rotation", "linear", "unrotated"),
    [
        ("qwen3_moe", "half", False, set()),
        ("mixtral", "half", True, set()),
        ("phi", "half", True, set()),  # a part of each head rotates
        ("olmo", "half", True, set()),
        ("starcoder2", "half", True, set()),
        ("ernie4_5", "interleaved", False, set()),
        ("hunyuan_v1_dense", "other", False, set()),  # it normalises keys after the rotation
        ("exaone4", "half", False, {3}),
        ("cohere2", "interleaved", False, {3}),
        ("llama4_text", "interleaved", False, {3}),  # its angles are complex numbers
    ],
)
def test_what_is_read_from_attention_modules_is_how_the_family_rotates(model_type, rotation, linear, unrotated):
    model = tiny_model(tiny_config(model_type))
    before = attention_of(model)
    structure = read_structure(model)
    assert (structure.family.rotation, structure.family.linear) == (rotation, linear)
    assert structure.unrotated == unrotated
    assert (attention_of(model), count_hooks(model)) == (before, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("model_type", "linear"),
    [("mixtral", True), ("phi", True), ("qwen3_moe", False), ("exaone4", False), ("llama4_text", False)],
)
def test_sixteen_bits_hide_no_norm(model_type, linear, dtype):
    structure = read_structure(tiny_model(tiny_config(model_type)).to(dtype))
    assert structure.family.linear is linear
    expected = read_structure(tiny_model(tiny_config(model_type)))
    assert (structure.family, structure.unrotated) == (expected.family, expected.unrotated)


def test_what_is_read_of_listed_families_is_what_the_table_says():
    for model_type in ("llama", "qwen3", "gemma3_text", "smollm3", "olmo2", "glm4"):
        model = tiny_model(tiny_config(model_type))
        structure = read_structure(model)
        spec = install(model)
        assert structure.family.rotation == spec.family.rotation
        assert structure.family.one_base == spec.family.one_base
        assert structure.unrotated == spec.unrotated


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "exaone4"])
@pytest.mark.slow
def test_a_proved_model_is_idle_the_stock_model_and_order_free_methods_are(model_type):
    engine = opened(model_type, sliding_window=64) if model_type == "exaone4" else opened(model_type)
    spec = engine.loaded.spec
    assert (spec.unhooked, spec.is_listed) == (None, False)
    ids = torch.tensor([toy_layout().token_ids])
    with torch.inference_mode():
        expected = tiny_model(engine.loaded.model.config)(ids).logits
        assert torch.equal(engine.loaded.model(ids).logits, expected)
    shape = spec.shape if spec.windowed is None else spec.windowed.shape
    names = [name for name, cls in MITIGATIONS.items() if cls.order_invariant and create(name).refusal(shape) is None]
    assert {"parallel_windows", "set_prompting", "sorted_inter_document", "inter_document"} <= set(names)
    for name in names:
        base = log_probs(engine, name)
        for order in itertools.islice(itertools.permutations(range(4)), 5, 24, 6):
            assert float((log_probs(engine, name, order) - base).abs().max()) < 1e-4, (name, order)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "no attention that keeps keys"),
        ("falcon_mamba", "no attention that keeps keys"),  # forgets its state where several tokens follow
        ("jamba", "recurrent"),
        ("deepseek_v3", "kept apart"),
        ("gpt2", "adds positions"),
    ],
)
@pytest.mark.slow
def test_other_decoders_read_plain_prompts_as_the_stock_model_does(model_type, reason):
    engine = opened(model_type)
    spec = engine.loaded.spec
    assert reason in spec.unhooked.reason
    assert spec.reading.startswith("plain prompts: ")
    assert spec.shape.capabilities == set()
    layout = toy_layout()
    tokens = (5, 9, 11)
    with torch.inference_mode():
        ids = torch.tensor([[*layout.token_ids, *tokens]])
        stock = engine.loaded.model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    start = len(layout.token_ids) - 1
    expected = [float(stock[start + i, token]) for i, token in enumerate(tokens)]
    session = engine.open(layout, MitigationChoice("none"), 4)
    assert session.score(tokens) == pytest.approx(expected, abs=2e-3)
    for token, value in zip(tokens, expected, strict=True):
        assert float(session.next_log_probs()[token]) == pytest.approx(value, abs=2e-3)
        session.advance(token)
    for name in PLAIN_METHODS[1:]:
        reverse = log_probs(engine, name, (3, 2, 1, 0))
        assert float((log_probs(engine, name) - reverse).abs().max()) < 1e-4, name
    with pytest.raises(UnsupportedModelError, match="runs without the attention hook"):
        log_probs(engine, "parallel_windows")
    with pytest.raises(UnsupportedModelError, match="attention cannot be measured"):
        engine.question_attention([layout])
    assert check_again(engine.loaded.model, spec).max_logit_difference < 1e-2


def test_layers_with_chunks_keep_all_keys_within_the_first_chunk():
    engine = opened("llama4_text", attention_chunk_size=64, attn_temperature_tuning=False)
    spec = engine.loaded.spec
    assert (spec.unhooked, spec.windowed.shape.context_window, spec.unrotated) == (None, 64, {3})
    longer = toy_layout((20, 30, 20, 20))  # reaches into the second chunk
    stock = tiny_model(engine.loaded.model.config)
    with torch.inference_mode():
        ids = torch.tensor([[*longer.token_ids, 5]])
        expected = stock(ids).logits
        assert torch.equal(engine.loaded.model(ids).logits, expected)
    session = engine.open(longer, MitigationChoice("none"), 4)
    for position in (-2, -1):
        difference = session.next_log_probs() - expected[0, position].log_softmax(-1)
        assert float(difference.abs().max()) < 1e-4
        session.advance(5)
    for name in ("parallel_windows", "set_prompting", "parallel_encoding", "context_experts"):
        reverse = log_probs(engine, name, (3, 2, 1, 0))
        assert float((log_probs(engine, name) - reverse).abs().max()) < 1e-4, name
    with pytest.raises(UnsupportedModelError, match="rotates by complex numbers, the hook by cosines and sines"):
        engine.open(longer, MitigationChoice("multi_base"), 4)


def test_queries_that_are_scaled_by_their_place_allow_no_other_positions():
    engine = opened("llama4_text", attention_chunk_size=64, attn_temperature_tuning=True, floor_scale=48)
    within = engine.loaded.spec.windowed.shape
    assert within.context_window == 47  # from 48 tokens on the scale is another
    with pytest.raises(UnsupportedModelError, match="scales queries by their place in the cache"):
        log_probs(engine, "set_prompting")
    assert float((log_probs(engine, "default") - log_probs(engine, "default", (2, 0, 3, 1))).abs().max()) < 1e-4
    with pytest.raises(PromptTooLongError, match="windows keep 47"):
        engine.open(toy_layout((20, 20, 9, 6)), MitigationChoice("stable_mask"), 4)


def test_an_encoder_is_refused_and_left_alone():
    model = tiny_model(tiny_config("bert"))
    with pytest.raises(UnsupportedModelError, match="it is not a decoder"):
        prepare(model)
    assert count_hooks(model) == 0


def test_a_model_whose_cache_is_wrong_is_refused(monkeypatch):
    model = tiny_model(tiny_config("gpt2"))
    block = model.transformer.h[1].attn
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda *a, **o: forward(*a, **{**o, "past_key_values": None}))
    with pytest.raises(UnsupportedModelError, match="other logits with its cache than without"):
        prepare(model)


def test_a_model_that_fails_a_check_of_the_hook_is_read_without_it(monkeypatch):
    from rag_posfix.patching import attention_hook

    kernel = attention_hook.attend_causal_rows
    monkeypatch.setattr(attention_hook, "attend_causal_rows", lambda *arguments: kernel(*arguments) * 1.5)
    model = tiny_model(tiny_config("mixtral"))
    spec = prepare(model)
    assert "differs from native" in spec.unhooked.reason
    assert (attention_of(model), count_hooks(model)) == ("sdpa", 0)


def test_a_sliding_window_model_runs_every_method_whose_call_fits_the_windows():
    engine = opened("mistral", sliding_window=48)
    spec = engine.loaded.spec
    assert Capability.FULL_CACHE not in spec.shape.capabilities
    assert spec.windowed.shape.capabilities == set(Capability)
    assert spec.windowed.shape.context_window == 48
    full = opened("mistral", sliding_window=None)
    for name in ("parallel_windows", "set_prompting", "sorted_inter_document", "parallel_encoding"):
        assert torch.equal(log_probs(engine, name), log_probs(full, name)), name
    longer = toy_layout((14, 14, 14, 14, 14))  # more tokens than the windows have, at positions that fit them
    windows = MitigationChoice("parallel_windows")
    windowed, unlimited = engine.open(longer, windows, 2), full.open(longer, windows, 2)
    for token in (3, 4):
        assert torch.equal(windowed.next_log_probs(), unlimited.next_log_probs())
        windowed.advance(token)
        unlimited.advance(token)
    with pytest.raises(PromptTooLongError, match="sliding windows keep 48"):
        engine.open(toy_layout((32, 4, 9, 6)), MitigationChoice("parallel_windows"), 4)
    engine.open(toy_layout((32, 4, 9, 6)), MitigationChoice("context_experts"), 4)


def test_the_decoder_of_a_multimodal_wrapper_gets_the_hook():
    engine = opened("gemma3")
    assert isinstance(engine.loaded.model, transformers.Gemma3ForConditionalGeneration)
    assert engine.loaded.spec.unhooked is None
    differences = log_probs(engine, "context_experts") - log_probs(engine, "context_experts", (2, 0, 3, 1))
    assert float(differences.abs().max()) < 1e-4
