import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.index import file_formats
from rag_posfix.retrieval.index.file_formats import VectorIndex


def unit(count, dimension=16, seed=0):
    rows = np.random.default_rng(seed).standard_normal((count, dimension), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def filled(kind, rows):
    index = VectorIndex(rows.shape[1], kind)
    index.add(np.arange(len(rows)), rows)
    return index


def best(rows, query, k, allowed=None):
    """The keys of the k largest inner products, by sorting them all."""
    keys = np.arange(len(rows)) if allowed is None else np.asarray(allowed)
    return set(keys[np.argsort(-(rows[keys] @ query[0]))[:k]].tolist())


@pytest.fixture(autouse=True, scope="module")
def graphs_are_walked():
    """However few vectors there are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_formats, "EXACT_UNTIL", 0)
        yield


@pytest.fixture
def small_graph(monkeypatch):
    """Graphs from 200 vectors on."""
    monkeypatch.setattr(file_formats, "GRAPH_FROM", 200)


def test_a_graph_is_built_by_the_call_that_reaches_the_threshold(small_graph):
    rows = unit(260)
    index = filled("auto", rows[:199])
    assert not index.is_graph
    index.add(np.arange(199, 260), rows[199:])
    assert index.is_graph
    assert len(index) == 260
    assert np.array_equal(index.rows(np.array([3, 199, 259])), rows[[3, 199, 259]])


def test_flat_stays_flat_and_hnsw_is_a_graph_from_the_start(small_graph):
    assert not filled("flat", unit(300)).is_graph
    assert filled("hnsw", unit(3)).is_graph


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_the_candidates_hold_the_best(kind):
    rows, queries = unit(2000), unit(20, seed=1)
    index = filled(kind, rows)
    for query in queries[:, None]:
        assert best(rows, query, 10) <= set(index.candidates(query, 10).tolist())


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("share", [2, 5, 50])
def test_among_the_allowed_the_best_are_found_however_few_they_are(kind, share):
    rows, queries = unit(2000), unit(10, seed=1)
    index = filled(kind, rows)
    allowed = np.arange(0, 2000, share)
    for query in queries[:, None]:
        found = set(index.candidates(query, 10, allowed).tolist())
        assert best(rows, query, 10, allowed) <= found <= set(allowed.tolist())


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("gap", [[], [15]])
def test_allowed_keys_are_found_after_the_first_vectors_were_removed(kind, gap):
    index = filled(kind, unit(40))
    index.remove(np.array([*range(11), *gap]))  # more than a quarter: a graph is rebuilt without them
    for allowed in ([11], [12, 20], [13, 39]):
        assert sorted(index.candidates(unit(1, seed=1), 5, np.array(allowed)).tolist()) == allowed


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_more_than_there_are_allowed_returns_all_of_them(kind):
    index = filled(kind, unit(300))
    assert sorted(index.candidates(unit(1, seed=1), 50, np.array([1, 7, 250])).tolist()) == [1, 7, 250]
    assert index.candidates(unit(1, seed=1), 5, np.array([], dtype=np.int64)).tolist() == []
    assert sorted(index.candidates(unit(1, seed=1), 400).tolist()) == list(range(300))


def test_a_walk_that_meets_too_few_allowed_vectors_falls_back_to_comparing_all(monkeypatch):
    # Two far clusters: a walk towards the first does not pass the second, which alone is allowed.
    monkeypatch.setattr(file_formats, "SEARCH_WIDTH", 4)
    near, far = unit(1000, seed=1) * 0.1, unit(1000, seed=2) * 0.1
    near[:, 0] += 1
    far[:, 0] -= 1
    rows = np.concatenate([near, far])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = filled("hnsw", rows)
    allowed = np.arange(1000, 2000)
    query = rows[:1]
    assert best(rows, query, 10, allowed) <= set(index.candidates(query, 10, allowed).tolist())


def test_all_that_tie_with_the_last_place_are_candidates():
    rows = np.concatenate([unit(300), np.repeat(unit(1, seed=9), 60, axis=0)])
    index = filled("flat", rows)
    assert set(range(300, 360)) <= set(index.candidates(rows[-1:], 3).tolist())


def test_a_removed_vector_is_not_found_in_a_graph_and_still_leads_to_others():
    rows = unit(1000)
    index = filled("hnsw", rows)
    index.remove(np.arange(0, 100))
    assert len(index) == 900
    assert index.stored.ntotal == 1000
    for key in (0, 50, 99):
        found = set(index.candidates(rows[key : key + 1], 10).tolist())
        assert best(rows, rows[key : key + 1], 10, range(100, 1000)) <= found
        assert min(found) >= 100


def test_a_graph_is_built_anew_when_more_than_a_quarter_of_it_is_removed():
    rows = unit(400)
    index = filled("hnsw", rows)
    index.remove(np.arange(0, 100))
    assert index.stored.ntotal == 400
    index.remove(np.array([100]))
    assert index.stored.ntotal == len(index) == 299
    assert np.array_equal(index.rows(np.array([101, 399])), rows[[101, 399]])


def test_a_graph_that_shrank_to_less_than_half_the_threshold_becomes_flat(small_graph):
    index = filled("auto", unit(240))
    index.remove(np.arange(50))
    index.rebuild()
    assert index.is_graph
    index.remove(np.arange(50, 141))
    assert not index.is_graph
    assert len(index) == 99


def test_a_few_vectors_are_compared_with_all_even_if_they_are_a_graph(monkeypatch):
    monkeypatch.setattr(file_formats, "EXACT_UNTIL", 4096)
    rows = np.concatenate([unit(300), np.repeat(unit(1, seed=9), 60, axis=0)])
    assert set(range(300, 360)) <= set(filled("hnsw", rows).candidates(rows[-1:], 3).tolist())


def test_a_stored_graph_becomes_flat_when_a_flat_index_is_added_to():
    rows = unit(100)
    index = VectorIndex(16, "flat", stored=filled("hnsw", rows[:99]).stored, removed={3})
    assert index.is_graph
    index.add(np.array([99]), rows[99:])
    assert not index.is_graph
    assert sorted(index.candidates(rows[:1], 100).tolist()) == [key for key in range(100) if key != 3]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="unknown index kind='ivf'; choose one of auto, flat, hnsw"):
        VectorIndex(4, "ivf")


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_after_any_adding_and_removing_a_graph_finds_what_a_flat_index_finds(data):
    rows = unit(120, dimension=6)
    flat, graph = VectorIndex(6, "flat"), VectorIndex(6, "hnsw")
    held: set[int] = set()
    next_key = 0
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 24))
        keys = np.arange(next_key, next_key + count)
        for index in (flat, graph):
            index.add(keys, rows[keys])
        held |= set(keys.tolist())
        next_key += count
        gone = np.array(sorted(data.draw(st.sets(st.sampled_from(sorted(held)), max_size=len(held)))), dtype=np.int64)
        for index in (flat, graph):
            index.remove(gone)
        held -= set(gone.tolist())
    assert len(flat) == len(graph) == len(held)
    query = unit(1, dimension=6, seed=5)
    assert set(flat.candidates(query, 200).tolist()) == set(graph.candidates(query, 200).tolist()) == held
    wanted = best(rows, query, 3, sorted(held)) if held else set()
    assert wanted <= set(graph.candidates(query, 3).tolist())
