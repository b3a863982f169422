from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rag_posfix.checked import Checked
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import ConfigError
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.parameters import Integer, Number, NumberList, check_parameters, parameters_of, shown
from rag_posfix.reranking import RERANKERS


@dataclass(frozen=True)
class Method:
    """One field of every kind."""

    kind: ClassVar[str] = "no parameter"

    share: Annotated[float, Number(0, 1)] = 0.5
    sharp: Annotated[float, Number(0, 100, exclusive_min=True)] = 1.0
    count: Annotated[int | None, Integer(1)] = None
    weights: Annotated[tuple[float, ...], NumberList(-1, 1, min_length=1, max_length=3)] = (1.0,)
    choose: Literal["first", "best"] = "first"
    contrast: Annotated[float | Literal["divergence"], Number(0, 2)] = 0.0
    flag: bool = False
    rounds: Annotated[int, Integer(1, 5)] = 1
    any_numbers: Annotated[tuple[float, ...], NumberList(min_length=2, max_length=9)] = (0.0, 0.0)
    free: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_parameters(self, "method")


class Model(Checked, BaseModel):
    """The same ranges in a pydantic model."""

    name: ClassVar[str] = "method"

    share: Annotated[float, Number(0, 1)] = 0.5
    sharp: Annotated[float, Number(0, 100, exclusive_min=True)] = 1.0
    count: Annotated[int | None, Integer(1)] = None
    weights: Annotated[tuple[float, ...], NumberList(-1, 1, min_length=1, max_length=3)] = (1.0,)
    contrast: Annotated[float | Literal["divergence"], Number(0, 2)] = 0.0


@pytest.mark.parametrize("cls", [Method, Model])
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"share": 1.5}, "method: share=1.5 must be a number between 0 and 1"),
        ({"share": True}, "method: share=True must be a number between 0 and 1"),
        ({"share": math.nan}, "method: share=nan must be a number between 0 and 1"),
        ({"share": None}, "method: share=None must be a number between 0 and 1"),
        ({"sharp": 0}, "method: sharp=0 must be a number above 0 and at most 100"),
        ({"count": 0}, "method: count=0 must be a whole number >= 1, or None"),
        ({"count": 1.0}, "method: count=1.0 must be a whole number >= 1, or None"),
        ({"count": True}, "method: count=True must be a whole number >= 1, or None"),
        ({"weights": []}, r"method: weights=\[\] must be a list of 1 to 3 numbers between -1 and 1"),
        ({"weights": [0, 2]}, r"method: weights\[1\]=2 must be a number between -1 and 1"),
        (
            {"weights": "0.5,1"},
            r"method: weights='0.5,1' must be a list of 1 to 3 numbers between -1 and 1; write weights=\[0.5,1\]$",
        ),
        ({"weights": 1}, r"method: weights=1 must be a list .* and 1; write weights=\[1\]$"),
        ({"weights": "half"}, "method: weights='half' must be a list of 1 to 3 numbers between -1 and 1$"),
        ({"contrast": "jsd"}, "method: contrast='jsd' must be a number between 0 and 2, or 'divergence'"),
    ],
)
def test_a_value_of_another_type_or_outside_of_its_range_is_refused(parameters, message, cls):
    with pytest.raises(ConfigError, match=f"^{message}"):
        cls(**parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"choose": "worst"}, "method: choose='worst' must be 'first' or 'best'"),
        ({"flag": 1}, "method: flag=1 must be true or false"),
        ({"rounds": 6}, "method: rounds=6 must be a whole number from 1 to 5"),
        ({"any_numbers": [1, 10**400]}, r"method: any_numbers\[1\]=1000000*... must be a finite number"),
        ({"any_numbers": [1]}, r"method: any_numbers=\[1\] must be a list of 2 to 9 finite numbers"),
    ],
)
def test_names_truth_values_and_large_numbers_are_checked(parameters, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Method(**parameters)


def test_values_are_kept_in_one_form():
    made = Method(share=1, weights=[1, 0], count=3, contrast="divergence", free=("x",))
    assert made == Method(share=1.0, weights=(1.0, 0.0), count=3, contrast="divergence", free=("x",))
    assert [type(value) for value in (made.share, made.weights, made.weights[0])] == [float, tuple, float]


def test_a_long_value_is_not_quoted_in_full():
    with pytest.raises(ConfigError) as caught:
        Method(weights="x" * 1_000_000)
    assert len(str(caught.value)) < 400


def test_parameters_are_described_by_name_type_default_and_range():
    found = parameters_of(Method)
    model = parameters_of(Model)
    assert [(one.type, one.default, one.allowed) for one in model.values()] == [
        (found[name].type, found[name].default, found[name].allowed) for name in model
    ]
    assert list(found) == [
        "share",
        "sharp",
        "count",
        "weights",
        "choose",
        "contrast",
        "flag",
        "rounds",
        "any_numbers",
        "free",
    ]
    assert (found["count"].type, found["count"].default) == ("int | None", None)
    assert found["weights"].allowed == "a list of 1 to 3 numbers between -1 and 1"
    assert (found["free"].allowed, found["free"].check) == ("", None)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_is_taken_if_and_only_if_it_is_in_the_range(value):
    if 0 <= value <= 1:
        assert Method(share=value).share == value
    else:
        with pytest.raises(ConfigError):
            Method(share=value)


@pytest.mark.parametrize("name", MITIGATIONS.names())
def test_every_parameter_of_a_mitigation_has_a_type_that_is_checked(name):
    for parameter in parameters_of(MITIGATIONS.get(name)).values():
        assert parameter.default is not inspect.Parameter.empty
        assert parameter.check is not None or (name, parameter.name) == ("stack", "methods")


@pytest.mark.parametrize(
    "value",
    [
        "http://bob:SECRET@host",
        "http://bob:SECRET/with/slashes@host/rerank",
        "https://host/rerank?api_key=SECRET&x=1",
        {"url": "http://bob:SECRET@host"},
        "http://bob:" + "SECRET" * 60 + "@host",
        ["redis://:SECRET@host:6379/0"],
    ],
)
def test_no_password_of_a_url_is_quoted(value):
    assert "SECRET" not in shown(value)
    assert "//" in shown(value)


def test_a_wrong_url_of_a_reranker_is_reported_without_its_password():
    with pytest.raises(ConfigError) as caught:
        RERANKERS.check(MethodSpec("endpoint", {"url": "http://bob:SECRET@host"}))
    assert "SECRET" not in str(caught.value)
    assert "url=" in str(caught.value)
