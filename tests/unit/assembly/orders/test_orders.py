import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.orders import (
    Order,
    OrderInputs,
    apply_order,
    best_first,
    create_order,
    permute,
    ranks,
)
from rag_posfix.assembly.orders.cache_aware import CacheAware, RecentPrompts, displacement
from rag_posfix.assembly.orders.profile import Profile
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.plan.bias_profile import stretched
from tests.support.toy_encoder import ToyEncoder


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


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, ()),
        (1, (1,)),
        (4, (1, 3, 4, 2)),
        (5, (1, 3, 5, 4, 2)),
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


values = st.lists(st.floats(0, 1), min_size=2, max_size=12).map(tuple)


def test_the_best_documents_stand_in_the_slots_with_the_highest_values():
    # Slots by value: 3 (0.5), 0 (0.4), 1 (0.2), 2 (0.1). Documents by score: 2, 0, 3, 1.
    assert permute("profile:slots=[0.4,0.2,0.1,0.5]", [0.7, 0.1, 0.9, 0.3]) == (0, 3, 1, 2)


def test_of_equal_slots_the_earlier_gets_the_better_document():
    assert permute("profile:slots=[0.3,0.1,0.3]", [0.9, 0.8, 0.7]) == (0, 2, 1)


def test_a_profile_is_interpolated_linearly_to_more_slots():
    # Three slots on five: places 0, 1/2, 1, 3/2, 2 of the profile.
    assert stretched((4.0, 0.0, 2.0), 5) == (4.0, 2.0, 0.0, 1.0, 2.0)
    # By value: slots 0, 1 (2.0), 4 (2.0), 3, 2.
    assert permute("profile:slots=[4,0,2]", [0.9, 0.8, 0.7, 0.6, 0.5]) == (0, 1, 4, 3, 2)


def test_a_profile_is_interpolated_linearly_to_fewer_slots():
    # Five slots on three: places 0, 2, 4; on four: 0, 4/3, 8/3, 4.
    assert stretched((5.0, 1.0, 0.0, 3.0, 4.0), 3) == (5.0, 0.0, 4.0)
    assert stretched((5.0, 1.0, 0.0, 3.0, 4.0), 4) == pytest.approx((5.0, 2 / 3, 2.0, 4.0))
    assert stretched((5.0, 1.0), 1) == (5.0,)
    assert stretched((5.0, 1.0), 0) == ()


@given(values, st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_no_other_order_gives_more_relevance_to_well_read_slots(profile, relevance):
    """By the rearrangement inequality the sum of value times relevance is the largest when both are sorted alike."""
    slots = stretched(profile, len(relevance))
    placed = Profile(slots=profile)
    order = placed(OrderInputs(tuple(relevance)))
    reached = sum(value * relevance[index] for value, index in zip(slots, order, strict=True))
    best = sum(a * b for a, b in zip(sorted(slots), sorted(relevance), strict=True))
    assert reached == pytest.approx(best)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("profile", "needs the measured value of each slot"),
        ("profile:slots=[1,2]:file=x", "order profile has no parameter 'file'"),
        ("profile:slots=[1]", "must be a list of 2 to 1000 finite numbers"),
        ("profile:slots=[1,true]", r"slots\[1\]=True must be a finite number"),
        ("profile:slots=[1,Infinity]", r"slots\[1\]=inf must be a finite number"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused(order, message):
    with pytest.raises(ConfigError, match=message):
        permute(order, [None, None])


def test_an_assembler_uses_its_parameters_where_an_order_comes_without():
    assembler = Assembler(ToyEncoder(), 4096, order_parameters={"profile": {"slots": (0.1, 0.9, 0.5)}})
    documents = [
        Document(page_content=f"text {i}", id=str(i), metadata={"relevance_score": 1 - i / 10}) for i in range(3)
    ]
    assert assembler.assemble("Why?", documents, order="profile").ids == ("2", "0", "1")
    chosen = assembler.assemble("Why?", documents, order="profile:slots=[0.9,0.5,0.1]")
    assert (chosen.ids, chosen.order) == (("0", "1", "2"), "profile")


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


def test_the_newest_comes_first_and_a_repeated_one_is_new_again():
    memory = RecentPrompts()
    for keys in ("ab", "cd", "ab"):
        memory.add("scope", tuple(keys))
    memory.add("scope", ())
    assert memory.recent("scope") == (("a", "b"), ("c", "d"))


def test_scopes_see_nothing_of_each_other():
    memory = RecentPrompts()
    memory.add("one", ("a",))
    assert memory.recent("other") == ()


def test_it_is_bounded():
    memory = RecentPrompts(most_scopes=2, most_prompts=3)
    for number in range(10):
        memory.add("scope", (str(number),))
    assert memory.recent("scope") == (("9",), ("8",), ("7",))
    memory.add("b", ("x",))
    memory.add("scope", ("y",))
    memory.add("c", ("z",))
    assert (memory.recent("b"), len(memory.recent("scope"))) == ((), 3)


def test_what_is_gone_is_forgotten():
    memory = RecentPrompts()
    memory.add("scope", ("a", "b"))
    memory.add("scope", ("b", "c"))
    memory.drop(["a", "x"])
    assert memory.recent("scope") == (("b", "c"),)


def test_bounds_below_one_are_refused():
    with pytest.raises(ConfigError, match="must be >= 1"):
        RecentPrompts(most_prompts=0)
