import pytest

from rag_posfix.assembly.orders.cache_aware import RecentPrompts
from rag_posfix.errors import ConfigError


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
