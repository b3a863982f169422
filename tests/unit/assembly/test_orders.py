import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.assembly.orders import ORDERS, Order, OrderFacts, arrange, create_order, permute
from rag_posfix.errors import ConfigError, UnknownNameError

scores = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1), max_size=30)


def test_the_orders_are_registered():
    assert ORDERS.names() == (
        "cache_aware", "ends_first", "original", "profile", "random", "relevance", "reverse",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, ()),
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 3, 2)),
        (4, (1, 3, 4, 2)),
        (5, (1, 3, 5, 4, 2)),
        (6, (1, 3, 5, 6, 4, 2)),
    ],
)
def test_ends_first_by_rank(n, expected):
    falling = [1 - i / 10 for i in range(n)]
    assert tuple(i + 1 for i in permute("ends_first", falling)) == expected
    rising = falling[::-1]
    assert tuple(n - i for i in permute("ends_first", rising)) == expected
    assert tuple(i + 1 for i in permute("ends_first", [None] * n)) == expected


@pytest.mark.parametrize("n", range(1, 7))
def test_relevance_reverse_and_original_by_rank(n):
    rising = [i / 10 for i in range(n)]
    assert permute("relevance", rising) == tuple(reversed(range(n)))
    assert permute("reverse", rising) == tuple(range(n))
    assert permute("original", rising) == tuple(range(n))


def test_ties_and_missing_scores_keep_the_given_order():
    assert permute("relevance", [None, 0.5, 0.9, 0.5, None]) == (2, 1, 3, 0, 4)
    assert permute("reverse", [None, 0.5, 0.9, 0.5, None]) == (4, 0, 3, 1, 2)


@given(scores, st.integers(), st.sampled_from(ORDERS.names()))
def test_every_order_is_a_deterministic_permutation(relevance, seed, name):
    order = ORDERS.get(name)(**ORDERS.get(name).example)
    first = arrange(order, OrderFacts(tuple(relevance), seed))
    assert sorted(first) == list(range(len(relevance)))
    assert arrange(order, OrderFacts(tuple(relevance), seed)) == first


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_best_document_is_first_for_every_n(relevance):
    for name in ("relevance", "ends_first"):
        assert relevance[permute(name, relevance)[0]] == max(relevance)
    assert relevance[permute("reverse", relevance)[-1]] == max(relevance)


def test_random_depends_on_the_seed_alone_and_not_on_the_process():
    here = permute("random", [None] * 8, 7)
    assert here == permute("random", [0.1 * i for i in range(8)], 7)
    assert len({permute("random", [None] * 8, seed) for seed in range(20)}) > 15
    code = "from rag_posfix.assembly.orders import permute; print(permute('random', [None] * 8, 7))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)


def test_every_position_is_equally_likely_under_random():
    firsts = [permute("random", [None] * 4, seed)[0] for seed in range(400)]
    assert all(70 < firsts.count(i) < 130 for i in range(4))


def test_unknown_order_suggests_names():
    with pytest.raises(UnknownNameError, match=r"unknown order 'relevanse'\. Did you mean 'relevance'"):
        permute("relevanse", [])


def test_an_order_that_is_no_permutation_is_refused(monkeypatch):
    class Broken(Order):
        name = "broken"

        def __call__(self, facts):
            return (0, 0)

    monkeypatch.setitem(ORDERS._entries, "broken", Broken)
    with pytest.raises(ConfigError, match="order 'broken' returned 2 indices"):
        permute("broken", [None, None])


def test_parameters_of_an_order_are_checked_and_suggested():
    with pytest.raises(ConfigError, match=r"order cache_aware has no parameter 'bond'\. Did you mean 'bound'\?"):
        create_order("cache_aware:bond=1")
    with pytest.raises(ConfigError, match=r"order relevance has no parameter 'x'\. It takes: none"):
        create_order("relevance:x=1")
    with pytest.raises(ConfigError, match=r"'bound' in order 'cache_aware:bound' must be parameter=value"):
        create_order("cache_aware:bound")


def test_defaults_are_for_an_order_that_is_named_without_parameters():
    defaults = {"cache_aware": {"bound": 0.5}}
    assert create_order("cache_aware", defaults).bound == 0.5
    assert create_order("cache_aware:bound=0.1", defaults).bound == 0.1
    assert create_order("cache_aware").bound == 0.25


def test_the_parity_flip_of_other_reorderers_and_that_ends_first_has_none():
    """What langchain-community's LongContextReorder does: reverse the list, then fill it from the ends inwards."""

    def long_context_reorder(documents):
        reordered = []
        for i, document in enumerate(reversed(documents)):
            reordered.append(document) if i % 2 else reordered.insert(0, document)
        return reordered

    ranked = {n: list(range(1, n + 1)) for n in (3, 4, 10)}
    assert {n: long_context_reorder(documents) for n, documents in ranked.items()} == {
        3: [1, 3, 2],
        4: [2, 4, 3, 1],
        10: [2, 4, 6, 8, 10, 9, 7, 5, 3, 1],
    }
    for n in range(1, 21):
        best_is_first = long_context_reorder(list(range(1, n + 1)))[0] == 1
        assert best_is_first == (n % 2 == 1)
        assert permute("ends_first", [None] * n)[0] == 0
