import pytest

from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.registry import Registry


@pytest.fixture
def orders() -> Registry[str]:
    registry: Registry[str] = Registry("order")
    registry.register("reverse")("backwards")
    registry.register("relevance")("best first")
    registry.register("sides")("best at both ends")
    return registry


def test_register_returns_what_it_decorates_and_get_finds_it():
    functions = Registry("function")

    @functions.register("double")
    def double(x):
        return 2 * x

    assert double(3) == 6
    assert functions.get("double") is double


def test_a_taken_name_is_refused_and_keeps_its_first_entry(orders):
    with pytest.raises(ConfigError, match="order 'sides' is registered already; choose another name"):
        orders.register("sides")("something else")
    assert orders.get("sides") == "best at both ends"


def test_an_unknown_name_suggests_near_ones_and_lists_all(orders):
    with pytest.raises(UnknownNameError) as caught:
        orders.get("sidez")
    message = str(caught.value)
    assert message == ("unknown order 'sidez'. Did you mean 'sides'? Available: relevance, reverse, sides")
    assert caught.value.__suppress_context__


def test_a_name_far_from_all_gets_no_suggestion(orders):
    with pytest.raises(UnknownNameError, match=r"^unknown order 'xyzzy'\. Available: relevance, reverse, sides$"):
        orders.get("xyzzy")


def test_an_empty_registry_still_names_its_kind():
    with pytest.raises(UnknownNameError, match="unknown reranker 'a'"):
        Registry("reranker").get("a")


def test_unknown_names_are_config_errors_and_value_errors(orders):
    with pytest.raises(ValueError, match="unknown order"):
        orders.get("")
    with pytest.raises(ConfigError):
        orders.get("")


def test_names_and_items_are_sorted_whatever_the_order_of_registration(orders):
    assert orders.names() == ("relevance", "reverse", "sides")
    assert list(orders.items()) == [
        ("relevance", "best first"),
        ("reverse", "backwards"),
        ("sides", "best at both ends"),
    ]


def test_membership_is_by_name(orders):
    assert "sides" in orders
    assert "best first" not in orders
    assert None not in orders


def test_registries_share_nothing(orders):
    assert Registry("order").names() == ()
