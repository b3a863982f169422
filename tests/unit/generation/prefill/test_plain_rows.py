"""Models without the attention hook read the rows of a method in one batch, and store keys where they keep them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill import prefill as prefill_module
from rag_posfix.patching.install import prepare
from rag_posfix.patching.spec import KeptKeys
from tests.support.tiny import toy_layout
from tests.support.toy_encoder import ToyEncoder

SEVERAL_ROWS = ("default", "canonical_rotations", "committee", "passage_answers")
BATCHED = {"gpt2": "masked", "bloom": "masked", "deepseek_v3": "masked", "jamba": "masked", "mamba": "masked prompt"}
LAYOUT = toy_layout((9, 4, 6, 3), relevance=(0.9, 0.2, 0.4, 0.3))


def loaded_as(model_type):
    model = tiny_model(tiny_config(model_type))
    return LoadedModel(model, prepare(model))


def engine_of(loaded, store=None):
    return Engine(loaded, ToyEncoder(), loaded.model.config.model_type, "print", passages=store)


def changed(loaded, **changes):
    return replace(loaded, spec=replace(loaded.spec, unhooked=replace(loaded.spec.unhooked, **changes)))


def scores(engine, method, layout=LAYOUT, tokens=(7, 3, 11)):
    """The scores of the next token at the start of an answer and after each of its tokens."""
    session = engine.open(layout, MitigationChoice(method), 8)
    steps = [session.next_log_probs()]
    for token in tokens:
        session.advance(token)
        steps.append(session.next_log_probs())
    return torch.stack(steps)


class Passes(list):
    """The shape of the tokens of each forward pass of a model."""

    def __init__(self, model):
        super().__init__()
        model.register_forward_pre_hook(
            lambda module, arguments, given: self.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )


@pytest.mark.parametrize("model_type", BATCHED)
@pytest.mark.slow
def test_rows_in_a_batch_are_the_rows_one_after_another(model_type):
    loaded = loaded_as(model_type)
    assert loaded.spec.unhooked.batch == BATCHED[model_type]
    batched, one_by_one = engine_of(loaded), engine_of(changed(loaded, batch=""))
    for method in SEVERAL_ROWS[:2] if model_type != "gpt2" else SEVERAL_ROWS:
        assert float((scores(batched, method) - scores(one_by_one, method)).abs().max()) < 1e-4, method


@pytest.mark.parametrize("model_type", ["gpt2", "mamba"])
def test_the_shares_of_experts_are_their_weights_also_without_the_hook(model_type):
    request = GenerationRequest(LAYOUT, MitigationChoice("context_experts"), Sampling(max_tokens=3), attribution=True)
    generation = engine_of(loaded_as(model_type)).generate(request)
    assert generation.weighted
    assert sum(generation.attention) == pytest.approx(1, abs=1e-5)
    assert min(generation.attention) > 0
    assert all(sum(source.shares) == pytest.approx(1, abs=1e-5) for source in generation.sources)


@pytest.mark.parametrize("model_type", BATCHED)
def test_rows_are_read_in_one_pass_and_so_is_each_token_after_them(model_type):
    loaded = loaded_as(model_type)
    passes = Passes(loaded.model)
    scores(engine_of(loaded), "default")
    rows = LAYOUT.n_passages + 1
    longest = max(len(LAYOUT.select((index,)).token_ids) for index in range(LAYOUT.n_passages))
    assert passes == [(rows, longest), (rows, 1), (rows, 1), (rows, 1)]


def test_a_model_that_reads_its_padding_reads_one_row_after_another():
    loaded = loaded_as("rwkv")
    assert loaded.spec.unhooked.batch == ""
    passes = Passes(loaded.model)
    scores(engine_of(loaded), "default", tokens=())
    assert [rows for rows, _ in passes] == [1] * (LAYOUT.n_passages + 1)


def test_rows_with_more_tokens_than_a_batch_may_have_are_read_one_after_another(monkeypatch):
    loaded = loaded_as("gpt2")
    expected = scores(engine_of(loaded), "default")
    monkeypatch.setattr(prefill_module, "ROW_TOKENS", 20)
    passes = Passes(loaded.model)
    assert float((scores(engine_of(loaded), "default") - expected).abs().max()) < 1e-5
    assert {rows for rows, _ in passes} == {1}


@pytest.mark.parametrize("model_type", ["gpt2", "jamba", "mamba", "deepseek_v3"])
@pytest.mark.slow
def test_the_answer_in_a_batch_does_not_depend_on_the_order(model_type):
    engine = engine_of(loaded_as(model_type))
    for method in ("default", "committee"):
        expected = scores(engine, method)
        for order in itertools.islice(itertools.permutations(range(4)), 7, None, 4):
            assert torch.equal(scores(engine, method, LAYOUT.select(order)), expected), (method, order)


@pytest.mark.parametrize("method", ["none", "default", "canonical_rotations"])
@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "deepseek_v3", "falcon"])
def test_stored_keys_give_the_scores_of_a_cold_store_to_the_last_bit(model_type, method):
    loaded = loaded_as(model_type)
    store = PassageStore([MemoryTier()])
    engine = engine_of(loaded, store)
    cold = scores(engine, method)
    assert float((cold - scores(engine_of(loaded), method)).abs().max()) < 1e-4
    passes = Passes(loaded.model)
    assert torch.equal(scores(engine, method), cold)
    suffix = len(LAYOUT.suffix)
    assert {tokens for _, tokens in passes} == {suffix, 1}  # no passage was read again


def test_a_passage_is_found_in_another_order_and_company():
    loaded = loaded_as("deepseek_v3")
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    scores(engine, "default")
    passes = Passes(loaded.model)
    asked = GenerationRequest(LAYOUT.select((2, 0)), MitigationChoice("default"), Sampling(max_tokens=2))
    assert engine.cached_segments(asked) == (True, True, True)
    session = engine.open(asked.layout, asked.mitigation, 2)
    assert passes == [(3, len(LAYOUT.suffix))]
    assert session.cached_tokens == len(asked.layout.prefix) + sum(map(len, asked.layout.passages))
    other = toy_layout((5,), seed=1)
    assert engine.cached_segments(replace(asked, layout=other)) == (False, False)


def test_passages_are_read_ahead_and_then_found():
    loaded = loaded_as("gpt2")
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    method = MitigationChoice("default")
    prefix, passages = len(LAYOUT.prefix), sum(map(len, LAYOUT.passages))
    # Each passage is read behind a prefix of its own, and so is the row without passages.
    assert engine.precompute(LAYOUT, method) == passages + (LAYOUT.n_passages + 1) * prefix
    assert engine.precompute(LAYOUT, method) == 0
    assert engine.kv_bytes_per_token == 2 * 4 * 64 * 4  # four layers of 64 channels in float32
    assert engine.open(LAYOUT, method, 2).cached_tokens == prefix + passages
    with pytest.raises(ConfigError, match="cannot be precomputed; use one of committee, context_experts"):
        engine.precompute(LAYOUT, MitigationChoice("none"))


@pytest.mark.parametrize("model_type", ["mamba", "jamba"])
def test_layers_that_keep_no_keys_store_nothing(model_type):
    loaded, store = loaded_as(model_type), PassageStore([MemoryTier()])
    assert loaded.kept is None
    engine = engine_of(loaded, store)
    assert torch.equal(scores(engine, "default"), scores(engine_of(loaded), "default"))
    request = GenerationRequest(LAYOUT, MitigationChoice("default"), Sampling(max_tokens=2))
    assert engine.cached_segments(request) == (False,) * 5
    assert store.stats()["tiers"][0]["entries"] == 0


def test_keys_of_unlike_layers_are_laid_end_to_end():
    cache = DynamicCache()
    cache.update(torch.arange(8.0).reshape(1, 2, 2, 2), torch.arange(10.0, 12.0).reshape(1, 1, 2, 1), 0)
    cache.update(torch.arange(20.0, 22.0).reshape(1, 1, 2, 1), torch.arange(30.0, 36.0).reshape(1, 1, 2, 3), 1)
    kept = KeptKeys.of(cache, 2)
    assert kept == KeptKeys(((2, 2, 1, 1), (1, 1, 1, 3)))
    flat = kept.flatten(cache, 0, 2, 0)
    # Of each token the keys of head 0, of head 1, of the second layer; then the values, padded to as many.
    assert flat[0, 0, 0].tolist() == [[0, 1, 4, 5, 20], [2, 3, 6, 7, 21]]
    assert flat[1, 0, 0].tolist() == [[10, 30, 31, 32, 0], [11, 33, 34, 35, 0]]
    again = kept.cache([flat, flat])
    for layer, expected in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys.expand(2, -1, -1, -1))
        assert torch.equal(layer.values, expected.values.expand(2, -1, -1, -1))
    assert KeptKeys.of(cache, 3) is None  # a layer that dropped tokens
