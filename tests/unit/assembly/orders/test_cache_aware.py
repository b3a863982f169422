import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.assembly.orders import OrderInputs, best_first
from rag_posfix.assembly.orders.cache_aware import CacheAware, displacement
from rag_posfix.errors import ConfigError

FIVE = (0.9, 0.8, 0.7, 0.6, 0.5)


def facts(relevance=FIVE, keys="abcde", recent=(), order_free=False):
    return OrderInputs(
        tuple(relevance), keys=tuple(keys), recent=tuple(tuple(one) for one in recent), order_free=order_free
    )


def test_displacement_is_the_share_of_the_largest_footrule():
    rank = (0, 1, 2, 3)
    assert displacement((0, 1, 2, 3), rank) == 0
    # |0-1| + |1-0| of at most floor(16 / 2) = 8.
    assert displacement((1, 0, 2, 3), rank) == 2 / 8
    assert displacement((3, 2, 1, 0), rank) == 1
    assert displacement((2, 1, 0), (0, 1, 2)) == 1
    assert displacement((0,), (0,)) == displacement((), ()) == 0


def test_without_recent_prompts_it_is_best_first():
    assert CacheAware()(facts((0.1, 0.9, 0.5), "abc")) == (1, 2, 0)
    assert CacheAware()(OrderInputs((0.1, 0.9, 0.5))) == (1, 2, 0)


def test_the_longest_shared_beginning_within_the_bound_is_taken():
    # "ba" costs 2 of floor(25 / 2) = 12: 0.17. "bad" puts d third: places 1 0 3 2 4, 4 of 12: 0.33.
    recent = ["bad", "ab"]
    assert CacheAware()(facts(recent=recent)) == (0, 1, 2, 3, 4)  # "ab" is as long as "ba", and costs nothing
    assert CacheAware()(facts(recent=["bad"])) == (1, 0, 2, 3, 4)
    assert CacheAware(bound=0.4)(facts(recent=recent)) == (1, 0, 3, 2, 4)
    assert CacheAware(bound=0)(facts(recent=["bad"])) == (0, 1, 2, 3, 4)


def test_a_beginning_ends_where_a_document_is_not_here_or_comes_twice():
    assert CacheAware(bound=1)(facts(recent=["bxa"])) == (1, 0, 2, 3, 4)
    assert CacheAware(bound=1)(facts(recent=["eed"])) == (4, 0, 1, 2, 3)
    assert CacheAware(bound=1)(facts(recent=["xab"])) == (0, 1, 2, 3, 4)


def test_of_equal_beginnings_that_of_the_newer_prompt_is_taken():
    # Both cost the same: a neighbour swapped in.
    assert CacheAware(bound=1)(facts((0.5, 0.5, 0.4), "abc", ["ca", "cb"])) == (2, 0, 1)
    assert CacheAware(bound=1)(facts((0.5, 0.5, 0.4), "abc", ["cb", "ca"]))[:1] == (2,)


def test_where_order_costs_nothing_the_bound_is_not_asked_and_the_rest_is_sorted_by_content():
    assert CacheAware(bound=0)(facts(keys="edcba", recent=["xy"], order_free=True)) == (4, 3, 2, 1, 0)
    assert CacheAware(bound=0)(facts(keys="edcba", recent=["ce", "c"], order_free=True)) == (2, 0, 4, 3, 1)


@given(
    st.permutations("abcdef"),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
    st.lists(st.text("abcdefgh", max_size=6), max_size=6),
    st.floats(0, 1),
)
def test_the_loss_is_within_the_bound_and_no_recent_prompt_is_shared_less_than_best_first_shares_it(
    keys, relevance, recent, bound
):
    def shared(order, prompt):
        placed = [keys[index] for index in order]
        return next((i for i, (a, b) in enumerate(zip(placed, prompt, strict=False)) if a != b), min(6, len(prompt)))

    given_facts = facts(relevance, keys, recent)
    order = CacheAware(bound=bound)(given_facts)
    ranked = best_first(relevance, keys)
    rank = [ranked.index(index) for index in range(6)]
    assert sorted(order) == list(range(6))
    assert displacement(order, rank) <= bound
    longest = max((shared(order, prompt) for prompt in recent), default=0)
    assert longest >= max((shared(ranked, prompt) for prompt in recent), default=0)


@given(st.permutations("abcdef"), st.permutations(range(6)), st.lists(st.text("abcdef", max_size=6), max_size=4))
def test_an_order_free_method_gets_one_prompt_for_one_set_of_documents(keys, shuffled, recent):
    def contents(keys):
        return [keys[index] for index in CacheAware()(facts((None,) * 6, keys, recent, order_free=True))]

    assert contents(list(keys)) == contents([keys[index] for index in shuffled])


@pytest.mark.parametrize("bound", [-0.1, 1.1, True, "0.5", float("nan")])
def test_a_bound_outside_of_0_to_1_is_refused(bound):
    with pytest.raises(ConfigError, match="must be a number between 0 and 1"):
        CacheAware(bound=bound)
