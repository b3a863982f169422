"""Keys and values that are found give the answers that computed ones give."""

import dataclasses
import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.kv.store import KVCodec, PassageKV, PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.prefill.per_passage import KVLookup
from rag_posfix.mitigations import MITIGATIONS, create
from rag_posfix.mitigations.sorted_inter_document import CircularAttention
from rag_posfix.patching.attention_hook import Overrides
from rag_posfix.plan import layout as plan_layout
from rag_posfix.plan.layout import Span
from rag_posfix.plan.plan import HiddenScale
from tests.support.number_encoder import NumberEncoder
from tests.support.tiny import FAMILIES, loaded_model, stock_model, toy_layout

APART = ["parallel_windows", "set_prompting", "parallel_encoding", "context_experts", "passage_answers"]
LEADING = ["none", "calibrated_attention", "layer_scaling", "multi_base", "sorted_inter_document"]


@pytest.fixture(scope="module")
def loaded():
    return loaded_model(max_position_embeddings=4096)


def engine_of(loaded, store=None, print="print"):
    return Engine(loaded, NumberEncoder(), "tiny", print, passages=store)


def store_of():
    return PassageStore([MemoryTier()])


def request(layout, name, salt=""):
    choice = MitigationChoice(name, dict(MITIGATIONS.get(name).example))
    return GenerationRequest(layout, choice, Sampling(max_tokens=6), salt)


def first(engine, asked):
    return engine.open(asked.layout, asked.mitigation, 6, asked.salt).next_log_probs()


@pytest.fixture
def read_together(monkeypatch):
    """Set the shortest run of a plain prompt, so that short prompts have several."""
    return lambda tokens: monkeypatch.setattr(plan_layout, "READ_TOGETHER", tokens)


@pytest.mark.parametrize("n_tokens", [1, 10, 512])
@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_warm_answers_are_cold_answers(loaded, read_together, name, n_tokens):
    read_together(n_tokens)
    layout = toy_layout(relevance=(0.9, 0.2, 0.5, 0.4))
    engine = engine_of(loaded, store_of())
    asked = request(layout, name)
    cold, said = engine.generate(asked), first(engine_of(loaded, store_of()), asked)
    warm = engine.generate(asked)
    assert warm.token_ids == cold.token_ids == engine_of(loaded).generate(asked).token_ids
    assert torch.equal(first(engine, asked), said)
    assert cold.usage.cached_tokens == 0
    again = 4 if name == "blended" else 0  # 15 % of 26 tokens are read again
    reuses = name in [*APART, *LEADING, "blended", "canonical_rotations", "committee", "repeated_passages"]
    assert warm.usage.cached_tokens == (layout.suffix.start - again if reuses else 0)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 1), (1,)])
def test_passages_are_found_in_any_order_and_company(loaded, name, order, passes):
    layout, store = toy_layout(), store_of()
    engine = engine_of(loaded, store)
    engine.generate(request(layout, name))
    other = request(layout.select(order), name)
    passes.clear()
    found = first(engine, other)
    rows = len(create(name).plan(other.layout, loaded.spec.shape).rows)
    assert passes[0] == len(layout.suffix) * rows, "the suffix is all that is read"
    assert torch.equal(found, first(engine_of(loaded), other))


@pytest.mark.parametrize("name", [*APART, *LEADING])
def test_no_entry_carries_another_passage_into_a_prompt_without_it(loaded, read_together, name):
    """HijackKV attacks entries that were computed behind a hostile passage, which is the first one here."""
    read_together(1)
    layout, engine = toy_layout(), engine_of(loaded, store_of())
    engine.generate(request(layout, name))
    clean = request(layout.select((1, 2, 3)), name)
    assert torch.equal(first(engine, clean), first(engine_of(loaded, store_of()), clean))


def test_methods_that_read_passages_alike_share_them(loaded, passes):
    engine = engine_of(loaded, store_of())
    engine.generate(request(toy_layout(), "parallel_windows"))
    passes.clear()
    assert engine.generate(request(toy_layout(), "parallel_encoding")).usage.cached_tokens == 31
    assert passes[0] == 8


@pytest.mark.parametrize("name", ["none", "layer_scaling"])
@pytest.mark.parametrize(
    ("n_tokens", "shared_tokens"),
    [
        (1, (16, 5, 25, 31)),  # prefix 5 and passages of 7, 4, 9 and 6 are runs of their own: 5, 12, 16, 25, 31
        (10, (12, 5, 25, 31)),  # 5, 7, 4 + 9, 6: the runs end at 5, 12, 25, 31; with passage 1 first at 5 and 9
        (512, (12, 5, 12, 31)),  # 5, 7, 4 + 9 + 6: prefix and first passage, and one run
    ],
)
def test_leading_runs_are_found_up_to_the_first_that_differs(loaded, read_together, name, n_tokens, shared_tokens):
    read_together(n_tokens)
    layout, engine = toy_layout(), engine_of(loaded, store_of())
    engine.generate(request(layout, name))
    orders = [(0, 1, 3, 2), (1, 0, 2, 3), (0, 1, 2), (0, 1, 2, 3)]
    for order, shared in zip(orders, shared_tokens, strict=True):
        asked = request(layout.select(order), name)
        found = engine.generate(asked)
        assert found.usage.cached_tokens == shared
        assert found.token_ids == engine_of(loaded).generate(asked).token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_prompt_begins_with_the_prefix_and_passage_that_a_judge_has_read(family):
    loaded, layout = loaded_model(family), toy_layout()
    judged = engine_of(loaded, store_of())
    judged.first_token_log_probs(layout, (3, 17))
    for order in ((2, 0, 1), (1,), (3, 2, 1, 0)):
        asked = request(layout.select(order), "none")
        session = judged.open(asked.layout, asked.mitigation, 6)
        assert session.cached_tokens == asked.layout.passages[0].stop
        stock = stock_model(family)(torch.tensor([asked.layout.token_ids])).logits[0, -1].log_softmax(dim=-1)
        assert torch.allclose(session.next_log_probs(), stock, atol=1e-5)
        assert torch.allclose(session.next_log_probs(), first(engine_of(loaded, store_of()), asked), atol=1e-6)


def test_twenty_cold_passages_are_read_in_seven_passes_and_the_warm_prompt_is_equal(loaded, passes):
    asked = request(toy_layout((150,) * 20, prefix=40), "none")
    engine = engine_of(loaded, store_of())
    cold = first(engine, asked)
    # The prefix and the first passage, in whole tiles; three passages; four times four; the suffix.
    assert passes == [48, 160, 450, 600, 600, 600, 600, 8]
    passes.clear()
    assert torch.equal(first(engine, asked), cold)
    assert passes == [8]


def test_the_same_tokens_in_other_runs_are_stored_apart(loaded, read_together):
    read_together(10)
    store, layout, spans = store_of(), toy_layout(), (Span(5, 25), Span(25, 31))
    for each in (layout, dataclasses.replace(layout, passages=spans, texts=spans, keys=("a", "b"))):
        first(engine_of(loaded, store), request(each, "none"))
    # Runs that end at 5, 12, 25 and 31, and at 5, 25 and 31: the last one follows 25 tokens in three runs, or in two.
    assert store.stats()["tiers"][0]["entries"] == 6


@pytest.mark.parametrize(("lost", "shared"), [(0, 0), (1, 5), (2, 12), (3, 16), (4, 25)])
def test_leading_passages_behind_a_hole_are_read_again(loaded, read_together, lost, shared):
    read_together(1)

    class Holed(MemoryTier):
        """A tier that evicted one entry and kept those that follow it in the prompt."""

        def get_many(self, keys):
            for key in keys:
                requested.setdefault(key, len(requested))
            return {key: entry for key, entry in super().get_many(keys).items() if requested[key] != lost}

    requested: dict[str, int] = {}  # each key by its place in the prompt

    engine, asked = engine_of(loaded, PassageStore([Holed()])), request(toy_layout(), "none")
    expected = first(engine_of(loaded, store_of()), asked)
    engine.generate(asked)
    again = engine.open(asked.layout, asked.mitigation, 6)
    assert again.cached_tokens == shared, "prefix 5, passages 7, 4, 9 and 6"
    assert torch.equal(again.next_log_probs(), expected)


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        (Overrides(), True),
        (Overrides(rope_base_factor=1.9, layer_scale=(1.0, 1.5)), True),
        (Overrides(mask=lambda *_: None), False),
        (Overrides(attend=CircularAttention(toy_layout())), False),
        (Overrides(hidden_scale=HiddenScale(0, 2.0, range(2))), False),
    ],
)
def test_methods_share_the_first_tokens_of_a_prompt_only_if_they_read_them_causally(overrides, shared):
    one, other = (KVLookup(store_of(), "model", method).prefix_encoding(overrides) for method in ("one", "other"))
    assert (one == other) == shared


def test_sorted_passages_are_found_together_or_not_at_all(loaded):
    layout, engine = toy_layout(), engine_of(loaded, store_of())
    engine.generate(request(layout, "sorted_inter_document"))
    assert engine.generate(request(layout.select((3, 1, 2, 0)), "sorted_inter_document")).usage.cached_tokens == 31
    assert engine.generate(request(layout.select((3, 1, 2)), "sorted_inter_document")).usage.cached_tokens == 0


@pytest.mark.parametrize("name", ["none", "parallel_encoding", "context_experts"])
@pytest.mark.parametrize(
    "change",
    [
        {"salt": "another tenant"},
        {"print": "other weights"},
        {"prefix": 6},
    ],
)
def test_what_an_entry_depends_on_is_part_of_its_key(loaded, name, change):
    store = store_of()
    engine_of(loaded, store).generate(request(toy_layout(), name, "one tenant"))
    engine = engine_of(loaded, store, print=change.get("print", "print"))
    layout = toy_layout(prefix=change.get("prefix", 5))
    asked = request(layout, name, change.get("salt", "one tenant"))
    found = engine.generate(asked)
    assert found.usage.cached_tokens == 0
    assert found.token_ids == engine_of(loaded).generate(asked).token_ids


def test_parameters_that_change_the_reading_change_the_key(loaded):
    layout, engine = toy_layout(), engine_of(loaded, store_of())
    engine.generate(request(layout, "layer_scaling"))
    other = GenerationRequest(layout, MitigationChoice("layer_scaling", {"points": (1.0, 2.0, 1.0)}))
    assert engine.open(other.layout, other.mitigation).cached_tokens == 0
    for parameters, cached in (({"temperature": 0.5}, 31), ({}, 31)):
        engine.open(layout, MitigationChoice("parallel_encoding", parameters))
        assert engine.open(layout, MitigationChoice("parallel_encoding", parameters)).cached_tokens == cached


def test_right_indented_windows_are_read_elsewhere_and_kept_apart(loaded):
    layout, engine = toy_layout(), engine_of(loaded, store_of())
    engine.open(layout, MitigationChoice("parallel_windows"))
    right = MitigationChoice("parallel_windows", {"indentation": "right"})
    assert engine.open(layout, right).cached_tokens == 5 + 9, "the prefix, and the longest passage: it starts alike"
    assert engine.open(layout, right).cached_tokens == 31


@given(data=st.data())
@settings(max_examples=10, deadline=None)
@pytest.mark.slow
def test_any_part_of_the_store_may_be_missing(loaded_once, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_layout, "READ_TOGETHER", data.draw(st.sampled_from([1, 10, 512])))
        check_missing_parts(loaded_once, data)


def check_missing_parts(loaded_once, data):
    layout = toy_layout((7, 4, 9, 6, 5))
    name = data.draw(st.sampled_from([*APART, *LEADING]))
    store = store_of()
    engine = engine_of(loaded_once, store)
    for _ in range(2):
        some = data.draw(st.lists(st.sampled_from(range(5)), unique=True))
        engine.generate(request(layout.select(some), name))
    store.drop(data.draw(st.lists(st.sampled_from(layout.keys), unique=True)))
    asked = request(layout, name)
    cold = engine_of(loaded_once, store_of())
    # Not to the last bit: what is missing is read in one batch, whose size is part of the rounding.
    assert torch.allclose(first(engine, asked), first(cold, asked), atol=1e-5)
    assert engine.generate(asked).token_ids == cold.generate(asked).token_ids


@pytest.fixture(scope="module")
def loaded_once():
    return loaded_model()


def test_entries_of_a_document_can_be_dropped(loaded, read_together):
    read_together(10)
    layout, store = toy_layout(), store_of()
    engine = engine_of(loaded, store)
    for name in ("none", "parallel_windows"):
        engine.generate(request(layout, name))
    # One that was read apart, and under none its own run and the one after it, which has read it.
    assert store.drop([layout.keys[2]]) == 3
    assert engine.open(layout, MitigationChoice("parallel_windows")).cached_tokens == 31 - len(layout.passages[2])
    assert engine.open(layout, MitigationChoice("none")).cached_tokens == layout.passages[0].stop


@pytest.mark.parametrize("name", ["none", "context_experts"])
def test_a_document_that_is_deleted_while_it_is_read_is_not_kept(loaded_once, tmp_path, name):
    layout, disk = toy_layout(), DiskTier(tmp_path, KVCodec())
    store = PassageStore([MemoryTier(), disk])
    engine, found = engine_of(loaded_once, store), store.get_many

    def get_many(keys, **options):
        hits = found(keys, **options)
        store.drop([layout.keys[0]])  # between the search and the reading
        return hits

    store.get_many = get_many
    engine.generate(request(layout, name))
    assert store.flush()
    assert layout.keys[0] not in store.memory_tags()
    assert disk.delete_tags([layout.keys[0]]) == 0
    assert name == "none" or layout.keys[1] in store.memory_tags()  # under none it was read after the first
    store.close()


def test_a_document_that_was_deleted_is_not_written_to_disk_after_the_question_ended(loaded_once, tmp_path):
    begun, question_ended = threading.Event(), threading.Event()

    class Waiting(DiskTier):
        def put_many(self, entries):
            begun.set()
            assert question_ended.wait(60)
            super().put_many(entries)

    layout, disk = toy_layout(), Waiting(tmp_path, KVCodec())
    store = PassageStore([MemoryTier(), disk])
    engine, found = engine_of(loaded_once, store), store.get_many

    def get_many(keys, **options):
        hits = found(keys, **options)
        store.drop([layout.keys[0]])
        store.put_many({"another": PassageKV(torch.ones(2, 1, 1, 1, 2))})  # keeps the thread that writes busy
        assert begun.wait(60)
        store.get_many = found
        return hits

    store.get_many = get_many
    engine.generate(request(layout, "none"))
    gc.collect()  # nothing refers to the question any more
    question_ended.set()
    assert store.flush()
    assert disk.delete_tags([layout.keys[0]]) == 0
    store.close()


def test_models_with_sliding_windows_answer_without_the_store():
    loaded = loaded_model("mistral", sliding_window=16)
    store = store_of()
    for name in ("none", "context_experts"):
        for _ in range(2):
            found = engine_of(loaded, store).generate(request(toy_layout(), name))
        assert found.usage.cached_tokens == 0
        assert found.token_ids == engine_of(loaded).generate(request(toy_layout(), name)).token_ids


@pytest.mark.parametrize(("window", "cached"), [(512, True), (24, False)])
def test_passages_are_stored_where_rows_and_answer_fit_the_windows(window, cached):
    loaded, store = loaded_model("mistral", sliding_window=window), store_of()
    expected = engine_of(loaded_model("mistral", sliding_window=None)).generate(
        request(toy_layout(), "context_experts")
    )
    for _ in range(2):
        found = engine_of(loaded, store).generate(request(toy_layout(), "context_experts"))
        assert found.token_ids == expected.token_ids
    assert (found.usage.cached_tokens > 0) == cached


def test_an_answer_never_depends_on_the_tiers_health(loaded):
    class Failing:
        name, is_synchronous = "failing", True

        def __getattr__(self, attribute):
            raise OSError("the disk is gone")

    store = PassageStore([Failing()])
    for name in (*APART, *LEADING):
        found = engine_of(loaded, store).generate(request(toy_layout(), name))
        expected = engine_of(loaded).generate(request(toy_layout(), name))
        assert found.token_ids == expected.token_ids
        assert dataclasses.replace(found.usage, cached_tokens=0) == expected.usage
