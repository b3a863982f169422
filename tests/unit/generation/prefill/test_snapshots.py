"""Models whose layers keep more than keys store their whole cache after prefix and passage."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import CacheSnapshot, KVCodec, PassageKV, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.patching.install import prepare, snapshot_bytes
from rag_posfix.plan.layout import Layout
from tests.support.tiny import toy_layout
from tests.support.toy_encoder import ToyEncoder

# Windows of the tiny models are 32 tokens: prefix and passage are longer, and differ in length.
LENGTHS = (40, 33, 51)
LAYOUT = toy_layout(LENGTHS, relevance=(0.9, 0.2, 0.4))
ANOTHER = replace(LAYOUT, token_ids=(*LAYOUT.token_ids[: LAYOUT.suffix.start], *toy_layout(seed=3).token_ids[-8:]))
SLOW = ("qwen3_5_text", "falcon_h1", "nemotron_h", "kimi_linear", "deepseek_v32")
FAMILIES = ("qwen3_next", "lfm2", "gemma4_text", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@functools.cache
def loaded_as(model_type: str) -> LoadedModel:
    model = tiny_model(tiny_config(model_type))
    return LoadedModel(model, prepare(model))


def engine_of(loaded: LoadedModel, store: PassageStore | None = None) -> Engine:
    return Engine(loaded, ToyEncoder(), loaded.model.config.model_type, "print", passages=store)


@contextmanager
def longest_passes(model: Any) -> Iterator[list[int]]:
    """Yield the number of tokens of a row of each forward pass of a model."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, arguments, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


def scores(engine: Engine, layout: Layout = LAYOUT, method: str = "default") -> torch.Tensor:
    """The scores of the next token at the start of an answer, and after two tokens of it."""
    session = engine.open(layout, MitigationChoice(method), 8)
    steps = [session.next_log_probs()]
    for token in (7, 3):
        session.advance(token)
        steps.append(session.next_log_probs())
    return torch.stack(steps)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_two_questions_after_a_snapshot_have_the_scores_of_the_full_prompts(model_type: str) -> None:
    loaded = loaded_as(model_type)
    assert loaded.kept is None
    engine, plain = engine_of(loaded, PassageStore([MemoryTier()])), engine_of(loaded)
    cold = scores(engine)
    with longest_passes(loaded.model) as seen:
        assert torch.equal(scores(engine), cold)
    assert max(seen) == len(LAYOUT.suffix)  # no passage was read again
    for layout in (LAYOUT, ANOTHER, LAYOUT.select((2, 0))):
        assert float((scores(engine, layout) - scores(plain, layout)).abs().max()) < 1e-4


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_snapshot_gives_the_first_token_of_the_stock_model(model_type: str) -> None:
    loaded = loaded_as(model_type)
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    for layout in (LAYOUT.select((0,)), LAYOUT.select((0,)), ANOTHER.select((0,))):  # cold, found, another question
        with torch.inference_mode():
            expected = loaded.model(torch.tensor([layout.token_ids])).logits[0, -1].log_softmax(dim=-1)
        session = engine.open(layout, MitigationChoice("none"), 2)
        assert float((session.next_log_probs() - expected).abs().max()) < 1e-4
    assert session.cached_tokens == LAYOUT.select((0,)).suffix.start


@pytest.mark.parametrize("model_type", FAMILIES)
def test_snapshots_on_disk_serve_another_process_with_equal_bits(model_type: str, tmp_path: Path) -> None:
    loaded = loaded_as(model_type)

    def opened() -> PassageStore:
        return PassageStore([MemoryTier(), DiskTier(tmp_path, KVCodec())])

    with closing(opened()) as store:
        cold = scores(engine_of(loaded, store))
        assert store.flush()
    with closing(opened()) as store, longest_passes(loaded.model) as seen:
        assert torch.equal(scores(engine_of(loaded, store)), cold)
        assert store.stats()["hits"] == len(LENGTHS)
    assert max(seen) == len(LAYOUT.suffix)


@pytest.mark.parametrize("method", ["default", "passage_answers", "committee"])
def test_a_passage_is_found_by_each_method_that_reads_it_alone(method: str) -> None:
    loaded = loaded_as("qwen3_next")
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    engine.first_token_log_probs(LAYOUT, [5, 6])  # the judge
    entries = engine.passages.stats()["tiers"][0]["entries"]
    assert entries == len(LENGTHS)
    another = ANOTHER.select((2, 0))
    stored, full = scores(engine, another, method), scores(engine_of(loaded), another, method)
    assert float((stored - full).abs().max()) < 1e-4
    assert engine.passages.stats()["hits"] == 2
    assert engine.passages.stats()["tiers"][0]["entries"] == entries


def test_the_judge_gives_the_same_scores_with_and_without_snapshots() -> None:
    loaded = loaded_as("lfm2")
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    expected = engine_of(loaded).first_token_log_probs(LAYOUT, [5, 6])
    for _ in range(2):
        for ours, theirs in zip(engine.first_token_log_probs(LAYOUT, [5, 6]), expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert engine.question_likelihood(LAYOUT) == pytest.approx(engine_of(loaded).question_likelihood(LAYOUT), abs=1e-4)


def test_passages_are_read_ahead_and_dropped_by_their_document() -> None:
    loaded = loaded_as("lfm2")
    store = PassageStore([MemoryTier()])
    engine, request = (
        engine_of(loaded, store),
        GenerationRequest(LAYOUT, MitigationChoice("default"), Sampling(max_tokens=2)),
    )
    prefix = len(LAYOUT.prefix)
    assert engine.precompute(LAYOUT, request.mitigation) == sum(prefix + length for length in LENGTHS)
    assert engine.precompute(LAYOUT, request.mitigation) == 0
    assert engine.cached_segments(request) == (True, True, True, True)
    assert store.drop([LAYOUT.keys[1]]) == 1
    assert engine.cached_segments(request) == (True, True, False, True)


def test_short_passages_and_rows_of_several_passages_are_not_stored() -> None:
    loaded, store = loaded_as("qwen3_next"), PassageStore([MemoryTier()])
    engine = engine_of(loaded, store)
    short = toy_layout((9, 20), relevance=(0.9, 0.2))
    assert torch.equal(scores(engine, short), scores(engine_of(loaded), short))
    scores(engine, LAYOUT.select((0, 1)), "none")
    assert store.stats()["tiers"][0]["entries"] == 0


@pytest.mark.slow
def test_rows_whose_caches_cannot_be_joined_are_read_one_after_another() -> None:
    loaded = loaded_as("deepseek_v4")
    assert loaded.snapshots is not None
    engine = engine_of(loaded, PassageStore([MemoryTier()]))
    cold = scores(engine)
    with longest_passes(loaded.model) as seen:
        assert torch.equal(scores(engine), cold)
    assert max(seen) == len(LAYOUT.suffix)
    assert float((cold - scores(engine_of(loaded))).abs().max()) < 1e-4


def test_rows_are_joined_before_the_answer_where_their_questions_are_read_apart() -> None:
    loaded = loaded_as("qwen3_next")
    apart = replace(loaded, spec=replace(loaded.spec, unhooked=replace(loaded.spec.unhooked, joins="answer")))
    expected = scores(engine_of(loaded))
    with longest_passes(loaded.model) as seen:
        stored = scores(engine_of(apart, PassageStore([MemoryTier()])))
    assert float((stored - expected).abs().max()) < 1e-4
    # Each of four rows up to its question, each question, and a pass for each token of all rows.
    assert seen == [*(len(LAYOUT.prefix) + length for length in LENGTHS), len(LAYOUT.prefix), 8, 8, 8, 8, 1, 1]


def test_bytes_of_a_snapshot_are_counted_by_layer() -> None:
    loaded = loaded_as("lfm2")
    few, many = (snapshot_bytes(loaded.model, loaded.spec.unhooked, n) for n in (64, 128))
    assert [kind for kind, _ in few] == ["LinearAttentionLayer", "DynamicLayer"] * 2
    # Recurrent layers hold as much of any prompt; 64 tokens have keys and values of 2 heads of 16 channels of 4 bytes.
    assert [more - less for (_, less), (_, more) in zip(few, many, strict=True)] == [0, 64 * 2 * 2 * 16 * 4] * 2


def test_large_snapshots_are_not_sent_to_redis() -> None:
    sent: list[Mapping[str, PassageKV]] = []

    class Redis(MemoryTier[PassageKV]):
        name = "redis"

        def put_many(self, entries: Mapping[str, PassageKV]) -> None:
            sent.append(entries)

    store = PassageStore([Redis()])
    small, large = (CacheSnapshot(torch.zeros(n, dtype=torch.uint8)) for n in (100, 33 * 1024**2))
    store.put_many({"small": small, "large": large})
    assert [list(entries) for entries in sent] == [["small"]]


@pytest.mark.slow
def test_a_model_that_counts_positions_anew_after_its_cache_is_given_them() -> None:
    loaded = loaded_as("bamba")
    assert loaded.spec.unhooked.needs_positions
    with torch.inference_mode():
        expected = loaded.model(torch.tensor([(*LAYOUT.select((0,)).token_ids, 7)])).logits[0, -1].log_softmax(dim=-1)
    session = engine_of(loaded, PassageStore([MemoryTier()])).open(LAYOUT.select((0,)), MitigationChoice("none"), 2)
    session.advance(7)
    assert float((session.next_log_probs() - expected).abs().max()) < 1e-4
