"""Sketches of what replicas hold, and the choice of a replica: hand-worked, and as properties. No Ray."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.contracts.request import GenerationRequest
from rag_posfix.errors import ConfigError
from rag_posfix_api.ray_serve.routing import (
    Candidate,
    ReadPassages,
    RecentRoutes,
    RoutedRequest,
    Sketch,
    mark_of,
    marked_passages,
    overlap,
    ranked,
    score,
    tags_of,
)
from tests.support.tiny import toy_layout

PASSAGES = {1: 10, 2: 30, 3: 60}


def names(*candidates: Candidate, passages: dict[int, int] = PASSAGES, weight: float = 0.25) -> list[str]:
    return [one.name for one in ranked(passages, candidates, weight)]


def test_the_overlap_is_the_share_of_tokens():
    assert overlap(PASSAGES, {1, 3, 9}) == pytest.approx(0.7)
    assert overlap(PASSAGES, set()) == 0.0
    assert overlap({}, {1}) == 0.0


def test_the_score_takes_the_queue_off_the_overlap():
    assert score(PASSAGES, Candidate("a", 2, {2, 3}), 0.25) == pytest.approx(0.9 - 0.5)


def test_the_replica_that_holds_the_passages_is_chosen_until_its_queue_outweighs_them():
    def chosen(queue: int) -> str:
        return names(Candidate("holds", queue, {2, 3}), Candidate("idle"))[0]

    # 0.9 - 0.25 * 3 = 0.15 > 0 and 0.9 - 0.25 * 4 = -0.1 < 0
    assert [chosen(queue) for queue in (0, 3, 4)] == ["holds", "holds", "idle"]


def test_equal_scores_go_to_the_shorter_queue():
    # 0.3 - 0.1 * 3 = 0 = 0 - 0.1 * 0
    assert names(Candidate("holds", 3, {2}), Candidate("idle"), weight=0.1) == ["idle", "holds"]


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
    best = ranked(passages, candidates)[0]
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
    assert tags_of(asked(salt="a")) == own_tags("a", keys)


def test_a_sketch_holds_what_was_read_and_is_still_in_memory():
    read = ReadPassages()
    read.add(["a", "b", "c"])
    assert read.sketch({"a", "c", "other"}, 5.0) == Sketch(frozenset({mark_of("a"), mark_of("c")}), 5.0)
    assert read.sketch(None, 5.0).marks == {mark_of("a"), mark_of("b"), mark_of("c")}


def test_a_sketch_is_bounded_and_forgets_what_was_asked_longest_ago():
    read = ReadPassages(2)
    read.add(["a", "b"])
    read.add(["a", "c"])
    assert read.sketch(None, 0.0).marks == {mark_of("a"), mark_of("c")}
    with pytest.raises(ConfigError, match="max_marks=0 must be >= 1"):
        ReadPassages(0)


def test_a_sketch_comes_back_from_the_statistics():
    sketch = Sketch(frozenset({1, 2**64 - 1}), 100.0)
    assert Sketch.from_stats(sketch.as_stats(), 130.0, 30.0) == sketch


@pytest.mark.parametrize(
    "stats",
    [None, {}, {"marks": [1]}, {"marks": 3, "made_at": 100.0}, {"marks": ["1"], "made_at": 100.0},
     {"marks": [1], "made_at": "now"}, {"marks": [1], "made_at": 69.0}],
)  # fmt: skip
def test_an_unknown_malformed_or_stale_sketch_is_empty(stats):
    assert Sketch.from_stats(stats, 100.0, 30.0) == Sketch()


def test_what_was_sent_counts_until_sketches_have_it():
    recent = RecentRoutes(10.0)
    recent.add("a", [1, 2], 100.0)
    recent.add("a", [2], 105.0)
    recent.add("b", [3], 100.0)
    assert recent.marks("a", 109.0) == {1, 2}
    assert recent.marks("a", 112.0) == {2}
    assert recent.marks("c", 100.0) == frozenset()
    recent.keep_only(["a"])
    assert recent.marks("b", 100.0) == frozenset()


def test_the_text_for_prefix_routers_has_one_character_for_each_token():
    request = asked()
    prompt = RoutedRequest.of(request).prompt
    assert len(prompt) == len(request.layout.token_ids)
    assert prompt.encode()  # no half of a pair
    shuffled = RoutedRequest.of(asked((3, 1, 0, 2))).prompt
    before = request.layout.prefix.stop
    assert prompt[:before] == shuffled[:before]
