from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError, UnknownNameError
from rag_posfix.parameters import Number, check_parameters
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


def test_a_name_or_alias_that_is_taken_is_refused(orders):
    for add in (orders.register("sides"), orders.register("ends_first", aliases=("sides",))):
        with pytest.raises(ConfigError, match="order 'sides' is registered already"):
            add("something else")
    assert orders.get("sides") == "best at both ends"
    assert "ends_first" not in orders


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sidez", "unknown order 'sidez'. Did you mean 'sides'? Available: relevance, reverse, sides"),
        ("xyzzy", "unknown order 'xyzzy'. Available: relevance, reverse, sides"),
        ("SIDES", "unknown order 'SIDES'. Did you mean 'sides'? Available: relevance, reverse, sides"),
    ],
)
def test_an_unknown_name_suggests_near_ones_and_lists_all(orders, name, message):
    with pytest.raises(UnknownNameError) as caught:
        orders.get(name)
    assert str(caught.value) == message
    assert caught.value.__suppress_context__


def test_unknown_names_are_config_errors_and_value_errors():
    assert issubclass(UnknownNameError, ConfigError)
    with pytest.raises(ValueError, match="unknown reranker ''"):
        Registry("reranker").get("")


def test_names_and_items_are_sorted_whatever_the_order_of_registration(orders):
    assert orders.names() == ("relevance", "reverse", "sides")
    assert list(orders.items()) == [(name, orders.get(name)) for name in orders.names()]


def test_membership_is_by_name(orders):
    assert ["sides" in orders, "best first" in orders, None in orders] == [True, False, False]
    assert Registry("order").names() == (), "registries share nothing"


def test_an_alias_finds_its_entry_and_is_suggested_but_not_listed(orders):
    orders.register("ends_first", aliases=("two_stage",))("both ends")
    assert orders.get("two_stage") == "both ends"
    assert orders.resolve("two_stage") == "ends_first"
    assert orders.aliases("ends_first") == ("two_stage",)
    assert "two_stage" in orders
    assert "two_stage" not in orders.names()
    with pytest.raises(UnknownNameError, match=r"Did you mean 'two_stage' \(ends_first\)\?"):
        orders.get("two_stages")


def test_a_long_name_is_not_quoted_in_full(orders):
    with pytest.raises(UnknownNameError) as caught:
        orders.get("x" * 1_000_000)
    assert len(str(caught.value)) < 400


@pytest.fixture
def methods():
    methods: Registry[type] = Registry("method", parts=("model",))

    @methods.register("plain", aliases=("p",))
    @dataclass(frozen=True)
    class Plain:
        share: Annotated[float, Number(0, 1)] = 0.5

        def __post_init__(self) -> None:
            check_parameters(self, "plain")

    @methods.register("loaded")
    class Loaded(BaseModel):
        model: str
        count: int = Field(default=1, ge=1)

    return methods


def test_a_method_is_created_from_a_spec_by_name_or_alias(methods):
    assert methods.create(MethodSpec("p", {"share": 1})).share == 1.0
    made = methods.create(MethodSpec("loaded", {"count": 3}), {"model": lambda: "m"})
    assert (made.model, made.count) == ("m", 3)


def test_parts_are_made_for_those_who_take_them_and_are_no_parameters(methods):
    def never() -> str:
        raise LookupError("made a part that nobody needs")

    assert methods.create(MethodSpec("plain"), {"model": never}).share == 0.5
    assert list(methods.parameters("loaded")) == ["count"]
    with pytest.raises(ConfigError, match=r"method loaded has no parameter 'model'\. It takes: count"):
        methods.create(MethodSpec("loaded", {"model": "x"}), {"model": never})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MethodSpec("plan"), "unknown method 'plan'. Did you mean 'plain'"),
        (MethodSpec("plain", {"shape": 1}), "method plain has no parameter 'shape'. Did you mean 'share'"),
        (MethodSpec("plain", {"share": 2}), "plain: share=2 must be a number between 0 and 1"),
        (MethodSpec("loaded", {"count": 0}), "loaded: count=0 must be greater than or equal to 1"),
        (MethodSpec("loaded", {"count": "many"}), "loaded: count='many' must be a valid integer"),
    ],
)
def test_names_types_and_ranges_are_checked(methods, spec, message):
    with pytest.raises(ConfigError, match=message):
        methods.check(spec)
    with pytest.raises(ConfigError, match=message):
        methods.create(spec, {"model": lambda: "m"})


def test_a_check_needs_no_part_and_creating_does(methods):
    spec = MethodSpec("loaded", {"count": 2})
    methods.check(spec)
    with pytest.raises(ConfigError, match="loaded needs model; pass model="):
        methods.create(spec, {})


@dataclass(frozen=True)
class Scaled:
    factor: Annotated[float, Number(0, 2)] = 1.0
    kind: str = "plain"

    def __post_init__(self) -> None:
        check_parameters(self, "scaled")


@pytest.fixture
def scaled() -> Registry[type[Scaled]]:
    registry: Registry[type[Scaled]] = Registry("mitigation")
    registry.register("scaled", aliases=("paper",), presets={"default": {"factor": 0.5, "kind": "soft"}})(Scaled)
    return registry


def test_a_preset_stands_for_an_entry_with_parameters_that_a_user_may_replace(scaled):
    assert scaled.create(MethodSpec("default")) == Scaled(0.5, "soft")
    assert scaled.create(MethodSpec("default", {"factor": 2.0})) == Scaled(2.0, "soft")
    assert scaled.expand(MethodSpec("default", {"kind": "x"})) == ("scaled", {"factor": 0.5, "kind": "x"})
    assert scaled.create(MethodSpec("paper")) == scaled.create(MethodSpec("scaled")) == Scaled()
    assert scaled.presets("scaled") == {"default": {"factor": 0.5, "kind": "soft"}}
    assert scaled.names() == ("scaled",)


def test_parameters_beside_a_preset_are_checked(scaled):
    with pytest.raises(ConfigError, match="factor"):
        scaled.check(MethodSpec("default", {"factor": 3.0}))
    with pytest.raises(ConfigError, match="mitigation scaled has no parameter 'facto'"):
        scaled.check(MethodSpec("default", {"facto": 1.0}))


def test_a_preset_takes_no_name_that_exists_and_is_suggested(scaled):
    for taken in ("scaled", "paper", "default"):
        with pytest.raises(ConfigError, match="is registered already"):
            scaled.register("other", presets={taken: {}})(Scaled)
    with pytest.raises(UnknownNameError, match=r"Did you mean 'default' \(scaled\)"):
        scaled.get("defaul")
