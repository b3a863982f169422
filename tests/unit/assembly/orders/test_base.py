import pytest

from rag_posfix.assembly.orders import (
    Order,
    OrderFacts,
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


def test_unknown_order_suggests_names():
    with pytest.raises(UnknownNameError, match=r"unknown order 'relevanse'\. Did you mean 'relevance'"):
        permute("relevanse", [])


def test_an_order_that_is_no_permutation_is_refused():
    class Broken(Order):
        name = "broken"

        def __call__(self, facts):
            return (0, 0)

    with pytest.raises(ConfigError, match="order 'broken' returned 2 indices"):
        apply_order(Broken(), OrderFacts((None, None)))


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
