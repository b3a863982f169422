"""Models outside the table of families: the hook where every check passes, plain prompts elsewhere, or a refusal."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading

import pytest
import torch
import transformers

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import PromptTooLongError, UnsupportedModelError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.patching import attention_hook
from rag_posfix.patching import install as install_module
from rag_posfix.patching.attention_hook import current
from rag_posfix.patching.install import check_again, install, prepare, verify
from rag_posfix.patching.spec import Ranks
from rag_posfix.patching.structure import read_structure
from rag_posfix.plan.plan import Capability
from tests.support.attention_hook import attention_of, count_hooks
from tests.support.tiny import FAMILIES, loaded_model, toy_layout
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


# Each check of ``verify`` finds a fault that all the others miss.


CHECKS = {"idle", "rotation", "prompt", "decode", "long_prompt", "batch", "threads"}
LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "original_max_position_embeddings": 48,
}  # fmt: skip


@pytest.fixture
def loaded():
    return loaded_model()


def found_by(loaded):
    """Return the checks that a refusal names."""
    with pytest.raises(UnsupportedModelError, match="differs from native by") as caught:
        verify(loaded.model, loaded.spec)
    return set(re.findall(r"(\w+) \S+, allowed", str(caught.value)))


def wrong_kernel(monkeypatch, is_wrong):
    """Let the attention of the engine's own passes be wrong where ``is_wrong`` says so of queries and keys."""
    kernel = attention_hook.attend_causal_rows

    def broken(query, key, value, scaling, starts):
        out = kernel(query, key, value, scaling, starts)
        return out * 1.5 if is_wrong(query, key) else out

    monkeypatch.setattr(attention_hook, "attend_causal_rows", broken)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_model_passes_every_check(family):
    loaded = loaded_model(family)
    found = verify(loaded.model, loaded.spec)
    assert found.differences.keys() == CHECKS
    assert max(found.differences.values()) < 1e-4
    assert found.max_logit_difference == 0.0


@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq"])
def test_rotary_frequencies_that_were_not_initialised_are_found_whatever_else_computes_with_them(loaded, name):
    # The second is read by nothing but a longer prompt: no logits show it.
    getattr(loaded.model.model.rotary_emb, name)[-1] = 3.7e-12
    with pytest.raises(UnsupportedModelError, match=rf"Llama.* was loaded with a rotary_emb\.{name} that is not"):
        verify(loaded.model, loaded.spec)


def test_idle_finds_a_hook_that_acts_without_a_context(loaded, monkeypatch):
    sdpa = attention_hook.sdpa_attention_forward

    def broken(*arguments, **options):
        out, weights = sdpa(*arguments, **options)
        return (out * 1.5 if current() is None else out), weights

    monkeypatch.setattr(attention_hook, "sdpa_attention_forward", broken)
    assert found_by(loaded) == {"idle"}


def test_rotation_finds_angles_that_are_not_the_models(loaded):
    def half_as_fast(states, positions, factor):
        return loaded.spec.angles(states, positions / 2, factor)

    spec = dataclasses.replace(loaded.spec, angles=half_as_fast)
    assert found_by(dataclasses.replace(loaded, spec=spec)) == {"rotation"}


def test_prompt_finds_a_kernel_that_is_wrong_for_one_length(loaded, monkeypatch):
    layers = []

    def is_wrong(query, key):
        if query.shape[2] != key.shape[2] or query.shape[2] != 14:
            return False
        layers.append(query)
        return len(layers) % 2 == 0  # in the second of two layers, whose output no later token reads

    wrong_kernel(monkeypatch, is_wrong)
    assert found_by(loaded) == {"prompt"}


def test_decode_finds_a_kernel_that_is_wrong_for_one_token(loaded, monkeypatch):
    wrong_kernel(monkeypatch, lambda query, key: query.shape[2] == 1)
    assert found_by(loaded) == {"decode"}


def test_the_long_prompt_finds_a_sliding_window_that_was_taken_for_none():
    loaded = loaded_model("mistral", sliding_window=40)
    shape = dataclasses.replace(loaded.spec.shape, capabilities=frozenset(Capability))
    spec = dataclasses.replace(loaded.spec, shape=shape)
    assert found_by(dataclasses.replace(loaded, spec=spec)) == {"long_prompt"}


def test_the_long_prompt_finds_frequencies_that_do_not_change_beyond_the_original_window():
    loaded = loaded_model("phi3", **LONG_ROPE)
    verify(loaded.model, loaded.spec)
    spec = dataclasses.replace(loaded.spec, extended=loaded.spec)
    assert found_by(dataclasses.replace(loaded, spec=spec)) == {"long_prompt"}


def test_the_batch_finds_padding_that_is_attended_to(loaded, monkeypatch):
    kernel = attention_hook.attend_causal_rows
    monkeypatch.setattr(
        attention_hook,
        "attend_causal_rows",
        lambda query, key, value, scaling, starts: kernel(query, key, value, scaling, (0,) * len(starts)),
    )
    assert found_by(loaded) == {"batch"}


def test_threads_find_state_that_passes_share(loaded, monkeypatch):
    shared, together = {}, threading.Barrier(3, timeout=60)

    def is_wrong(query, key):
        shared["length"] = query.shape[2]
        if threading.current_thread() is not threading.main_thread():
            together.wait()  # all three threads come in between
        return shared["length"] != query.shape[2]

    wrong_kernel(monkeypatch, is_wrong)
    assert found_by(loaded) == {"threads"}


def test_a_model_that_is_split_over_processes_is_not_read_by_threads(loaded, monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(type(ranks), "count", 2)
    spec = dataclasses.replace(loaded.spec, ranks=ranks)
    assert verify(loaded.model, spec).differences.keys() == CHECKS - {"threads"}


@pytest.mark.parametrize(("thorough", "passes"), [(False, 1), (True, 2)])
def test_of_a_large_model_on_the_cpu_all_layers_are_read_once_unless_the_check_is_thorough(
    loaded, monkeypatch, thorough, passes
):
    monkeypatch.setattr(install_module, "LARGE", 0)
    read = []
    loaded.model.model.layers[-1].register_forward_pre_hook(lambda *_: read.append(1))
    checks = CHECKS | {"shifted", "plan"} if thorough else CHECKS
    assert verify(loaded.model, loaded.spec, thorough=thorough).differences.keys() == checks
    assert len(read) == passes  # by the model with the hook, and by the stock model


def test_the_long_prompt_of_a_large_model_is_cut_unless_the_check_is_thorough(monkeypatch):
    loaded = loaded_model("mistral", sliding_window=100)
    lengths = []
    loaded.model.register_forward_pre_hook(
        lambda module, arguments, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(install_module, "LONG_PROMPT_OPERATIONS", {"cpu": 0.0})
    verify(loaded.model, loaded.spec)
    assert max(lengths) == 32
    verify(loaded.model, loaded.spec, thorough=True)
    assert max(lengths) == 116  # 16 beyond the window
