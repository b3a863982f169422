"""Each check of ``verify`` finds a fault that all the others miss."""

import dataclasses
import re
import threading

import pytest

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.patching import attention_hook, install
from rag_posfix.patching.attention_hook import current
from rag_posfix.patching.install import verify
from rag_posfix.patching.spec import Ranks
from rag_posfix.plan.plan import Capability
from tests.support.tiny import FAMILIES, loaded_model

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
    monkeypatch.setattr(install, "LARGE", 0)
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
    monkeypatch.setattr(install, "LONG_PROMPT_OPERATIONS", {"cpu": 0.0})
    verify(loaded.model, loaded.spec)
    assert max(lengths) == 32
    verify(loaded.model, loaded.spec, thorough=True)
    assert max(lengths) == 116  # 16 beyond the window
