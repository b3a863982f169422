"""Sketches of what replicas hold, and the choice of a replica: hand-worked, and as properties. No Ray."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.request import GenerationRequest, tenant_tags
from rag_posfix.errors import ConfigError
from rag_posfix_api.ray_serve.routing import (
    ReadPassages,
    RecentRoutes,
    RoutedRequest,
    Sketch,
    Sketches,
    mark_of,
    marked_passages,
    ranked,
    tags_of,
)
from tests.support.tiny import toy_layout

PASSAGES = {1: 10, 2: 30, 3: 60}


class Candidate(NamedTuple):
    name: str
    queue: int = 0
    held: frozenset[int] = frozenset()


def names(*candidates: Candidate, passages: dict[int, int] = PASSAGES, weight: float = 0.25) -> list[str]:
    held = np.array([[mark in each.held for mark in passages] for each in candidates], dtype=bool)
    held = held.reshape(len(candidates), len(passages))
    named, queues = [each.name for each in candidates], [each.queue for each in candidates]
    return [named[row] for row in ranked(passages, named, queues, held, weight)]


def overlap(passages: dict[int, int], held: frozenset[int]) -> float:
    return sum(tokens for mark, tokens in passages.items() if mark in held) / sum(passages.values())


def test_the_replica_that_holds_the_passages_is_chosen_until_its_queue_outweighs_them():
    def chosen(queue: int) -> str:
        return names(Candidate("holds", queue, frozenset({2, 3})), Candidate("idle"))[0]

    # 0.9 - 0.25 * 3 = 0.15 > 0 and 0.9 - 0.25 * 4 = -0.1 < 0
    assert [chosen(queue) for queue in (0, 3, 4)] == ["holds", "holds", "idle"]


def test_equal_scores_go_to_the_shorter_queue():
    # 0.3 - 0.1 * 3 = 0 = 0 - 0.1 * 0
    assert names(Candidate("holds", 3, frozenset({2})), Candidate("idle"), weight=0.1) == ["idle", "holds"]


def test_without_any_sketch_the_shortest_queue_is_chosen():
    assert names(Candidate("a", 2), Candidate("b", 1), Candidate("c", 3)) == ["b", "a", "c"]


def test_questions_of_which_nobody_holds_anything_are_spread():
    chosen = [names(Candidate("a"), Candidate("b"), passages={n: 1})[0] for n in range(200)]
    assert 60 < chosen.count("a") < 140


CANDIDATES = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.integers(0, 9), st.frozensets(st.integers(0, 12), max_size=8)),
    min_size=1, max_size=5, unique_by=lambda one: one.name,
)  # fmt: skip


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 400), max_size=8), CANDIDATES, st.randoms())
def test_the_order_of_passages_and_replicas_never_changes_the_choice(passages, candidates, rng: random.Random):
    shuffled = list(passages.items())
    rng.shuffle(shuffled)
    replicas = list(candidates)
    rng.shuffle(replicas)
    assert names(*replicas, passages=dict(shuffled)) == names(*candidates, passages=passages)


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 400), min_size=1), CANDIDATES)
def test_nobody_with_a_shorter_queue_and_more_of_the_passages_comes_after_the_chosen(passages, candidates):
    best = {each.name: each for each in candidates}[names(*candidates, passages=passages)[0]]
    for other in candidates:
        better = other.queue < best.queue and overlap(passages, other.held) > overlap(passages, best.held)
        assert not better


def asked(order=(0, 1, 2, 3), salt: str = "", **layout) -> GenerationRequest:
    return GenerationRequest(toy_layout(**layout).select(order), salt=salt)


def test_marks_are_those_of_the_passages_whatever_their_order_and_the_prompt_around_them():
    marks = marked_passages(asked())
    assert sorted(marks.values()) == sorted(len(span) for span in asked().layout.passages)
    assert marked_passages(asked((3, 1, 0, 2))) == marks
    assert marked_passages(asked(prefix=9, suffix=3)) == marks
    assert set(marked_passages(asked((2, 0)))) < set(marks)


def test_marks_of_tenants_are_apart():
    assert not set(marked_passages(asked(salt="a"))) & set(marked_passages(asked(salt="b")))
    assert not set(marked_passages(asked(salt="a"))) & set(marked_passages(asked()))


def test_the_tags_are_those_of_the_passage_store():
    keys = asked().layout.keys
    assert tags_of(asked()) == keys
    assert tags_of(asked(salt="a")) == tenant_tags("a", keys)


def test_a_sketch_holds_what_was_read_and_is_still_in_memory():
    read = ReadPassages()
    read.add(["a", "b", "c"])
    assert read.sketch({"a", "c", "other"}, 5.0) == Sketch.of({mark_of("a"), mark_of("c")}, 5.0)
    assert read.sketch(None, 5.0) == Sketch.of({mark_of("a"), mark_of("b"), mark_of("c")}, 5.0)


def test_a_sketch_is_bounded_and_forgets_what_was_asked_longest_ago():
    read = ReadPassages(2)
    read.add(["a", "b"])
    read.add(["a", "c"])
    assert read.sketch(None, 0.0) == Sketch.of({mark_of("a"), mark_of("c")}, 0.0, 2)
    with pytest.raises(ConfigError, match="max_marks=0 must be >= 1"):
        ReadPassages(0)


def test_a_sketch_comes_back_from_the_statistics():
    sketch = Sketch.of({1, 2**64 - 1}, 100.0)
    assert Sketch.from_stats(sketch.as_stats()) == sketch
    assert Sketches(30.0).held({"a": sketch.as_stats()}, [1, 2**64 - 1, 2], 130.0).tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    "stats",
    [None, {}, {"bits": b"1"}, {"bits": 3, "made_at": 100.0}, {"marks": [1], "made_at": 100.0},
     {"bits": b"1", "made_at": "now"}, Sketch.of([1], 69.0).as_stats(), Sketch.of([1], 100.0, 10).as_stats()],
)  # fmt: skip
def test_an_unknown_malformed_stale_or_smaller_sketch_is_empty(stats):
    stats = {"a": stats, "b": Sketch.of([1], 100.0).as_stats()}
    assert Sketches(30.0).held(stats, [1], 100.0).tolist() == [[False], [True]]


def test_sketches_follow_replicas_that_come_change_and_go():
    sketches = Sketches(30.0)
    a, b, c = (Sketch.of([mark], 100.0).as_stats() for mark in (1, 2, 3))
    assert sketches.held({}, [1], 100.0).shape == (0, 1)
    assert sketches.held({"a": None}, [1], 100.0).tolist() == [[False]]
    assert sketches.held({"a": a}, [1, 2], 100.0).tolist() == [[True, False]]
    assert sketches.held({"a": b}, [1, 2], 100.0).tolist() == [[False, True]]
    assert sketches.held({"b": b, "a": c}, [2, 3], 100.0).tolist() == [[True, False], [False, True]]
    assert sketches.held({"a": c}, [], 100.0).shape == (1, 0)


def test_what_was_sent_counts_until_sketches_have_it():
    recent = RecentRoutes(10.0)
    recent.add("a", [1, 2], 100.0)
    recent.add("a", [2], 105.0)
    recent.add("b", [3], 100.0)
    assert recent.held(["a", "b"], [1, 2, 3], 109.0).tolist() == [[True, True, False], [False, False, True]]
    assert recent.held(["c", "a"], [1, 2, 3], 112.0).tolist() == [[False] * 3, [False, True, False]]


def test_a_sketch_has_all_of_its_marks_and_one_in_a_hundred_others():
    rng = random.Random(0)
    marks = [rng.getrandbits(64) for _ in range(4096)]
    sketch = Sketch.of(marks, 0.0)
    assert len(sketch.bits) == 5120
    held = Sketches(1.0).held({"a": sketch.as_stats()}, [*marks, *(rng.getrandbits(64) for _ in range(10_000))], 0.0)
    assert held[0, :4096].all()
    assert 40 < held[0, 4096:].sum() < 160


def test_the_text_for_prefix_routers_has_one_character_for_each_token():
    request = asked()
    prompt = RoutedRequest.of(request).prompt
    assert len(prompt) == len(request.layout.token_ids)
    assert prompt.encode()  # no half of a pair
    shuffled = RoutedRequest.of(asked((3, 1, 0, 2))).prompt
    before = request.layout.prefix.stop
    assert prompt[:before] == shuffled[:before]
