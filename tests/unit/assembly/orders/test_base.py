import itertools

import pytest

from rag_posfix.assembly.orders import (
    Order,
    OrderInputs,
    apply_order,
    best_first,
    create_order,
    permute,
    ranks,
)
from rag_posfix.errors import ConfigError, UnknownNameError


def test_best_first_and_ranks_keep_ties_and_put_missing_scores_last():
    assert best_first([None, 0.5, 0.9, 0.5]) == (2, 1, 3, 0)
    assert ranks([None, 0.5, 0.9, 0.5]) == (3, 1, 0, 2)


def test_documents_without_a_score_rank_below_negative_ones():
    assert best_first([None, -0.5, None, 0.0]) == (3, 1, 0, 2)


def test_ties_are_broken_by_content_whatever_the_order_they_came_in():
    documents = [(0.5, "b"), (0.9, "d"), (0.5, "a"), (None, "f"), (0.5, "c"), (None, "e")]
    expected = "dabcef"  # .9, the three of .5 by content, those without a score by content
    for some in itertools.permutations(documents):
        scores, keys = zip(*some, strict=True)
        assert "".join(keys[i] for i in best_first(scores, keys)) == expected
        assert [ranks(scores, keys)[keys.index(key)] for key in expected] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("relevance", "dabc"),
        ("reverse", "cbad"),
        ("ends_first", "dbca"),  # ranks 1 3 4 2
        ("profile:slots=[0.4,0.1,0.1,0.2]", "dbca"),  # slots from the best: 0, 3, 1 and 2 alike, the earlier first
        ("cache_aware", "dabc"),
    ],
)
def test_an_order_by_scores_puts_equal_ones_by_content(order, expected):
    made = create_order(order)
    for some in itertools.permutations([(0.5, "b"), (0.9, "d"), (0.5, "a"), (0.5, "c")]):
        scores, keys = zip(*some, strict=True)
        assert "".join(keys[i] for i in apply_order(made, OrderInputs(scores, keys=keys))) == expected


def test_without_scores_or_without_contents_the_given_order_stays():
    assert best_first([None, None, None], ["c", "a", "b"]) == (0, 1, 2)
    assert best_first([0.5, 0.5, 0.9], ["b"]) == (2, 0, 1)


def test_unknown_order_suggests_names():
    with pytest.raises(UnknownNameError, match=r"unknown order 'relevanse'\. Did you mean 'relevance'"):
        permute("relevanse", [])


def test_an_order_that_is_no_permutation_is_refused():
    class Broken(Order):
        name = "broken"

        def __call__(self, facts):
            return (0, 0)

    with pytest.raises(ConfigError, match="order 'broken' returned 2 indices"):
        apply_order(Broken(), OrderInputs((None, None)))


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
