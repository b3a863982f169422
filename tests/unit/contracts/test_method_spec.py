"""Methods as data and as text: labels, parsing, arrangements, and what the docstring of a method says of it."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.method_spec import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MethodSpec,
    Parametrised,
    named_method,
    parse_method,
    parse_value,
    read_arrangement,
    read_reranker,
    split_outside,
)
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number


def parse(text):
    return parse_method(text, "mitigation", "experts=5")


@pytest.mark.parametrize(
    ("parameters", "label"),
    [
        ({}, "x"),
        ({"b": 1, "a": "two"}, "x:a=two:b=1"),
        ({"a": [1.0, 1.3], "b": None, "c": True}, "x:a=[1.0,1.3]:b=null:c=true"),
        ({"a": "/some/path.json", "b": "p:q", "c": ["q:r"]}, 'x:a=/some/path.json:b="p:q":c=["q:r"]'),
        ({"a": "1", "b": "null", "c": "", "d": "é!"}, 'x:a="1":b="null":c="":d="é!"'),
    ],
)
def test_a_label_has_plain_words_and_compact_json_by_name(parameters, label):
    assert MethodSpec("x", parameters).label == label
    assert parse(label) == MethodSpec("x", parameters)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), VALUES, max_size=3))
def test_a_label_is_read_back_as_the_choice_that_it_names(parameters):
    choice = MethodSpec("some_method", parameters)
    assert parse(choice.label) == choice
    assert split_outside(f"none,{choice.label}", ",") == ["none", choice.label]


@pytest.mark.parametrize(("name", "parameters"), [(None, {}), ("x", [("a", 1)])])
def test_a_name_that_is_no_text_and_parameters_that_are_no_mapping_are_refused(name, parameters):
    with pytest.raises(ConfigError):
        MethodSpec(name, parameters)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("a,,", ["a", "", ""]),
        ("a:x=[1,2],b", ["a:x=[1,2]", "b"]),
        ('a:x=["]"],b', ['a:x=["]"]', "b"]),
        (r'a:x="\",",b', [r'a:x="\","', "b"]),
        ('a:x={"k":[1,{"l":2}]},b', ['a:x={"k":[1,{"l":2}]}', "b"]),
    ],
)
def test_a_separator_inside_of_brackets_or_quotes_does_not_split(text, parts):
    assert split_outside(text, ",") == parts


@pytest.mark.parametrize("text", ["x=[1,2", "x=1]", 'x=[{"k":1]}', 'x="b,c', r'x="b\"', 'x="b\\'])
def test_what_is_never_closed_or_opened_is_refused(text):
    with pytest.raises(ConfigError):
        split_outside(text, ",")


def test_the_longest_and_deepest_text_is_read_and_a_longer_or_deeper_one_refused():
    assert parse("x" * MAX_CHARACTERS).name == "x" * MAX_CHARACTERS
    assert parse("x:a=" + "[" * MAX_DEPTH + "]" * MAX_DEPTH).name == "x"
    for text in ("x" * (MAX_CHARACTERS + 1), "x:a=" + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)):
        with pytest.raises(ConfigError):
            parse(text)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("x", {}),
        (" x:a=1:b=two:c=true:d=null ", {"a": 1, "b": "two", "c": True, "d": None}),
        ("x:path=/a/b.json:text=a=b", {"path": "/a/b.json", "text": "a=b"}),
        ('x:path="/a:b"', {"path": "/a:b"}),
        ('x:methods=["a:x=[1,2]","b"]:y=1', {"methods": ["a:x=[1,2]", "b"], "y": 1}),
    ],
)
def test_a_choice_is_a_name_and_values_in_json_or_plain_words(text, parameters):
    assert parse(text) == MethodSpec("x", parameters)


@pytest.mark.parametrize("text", ["x:a", "x:=1", "x:a=1:a=1"])
def test_a_parameter_without_name_or_value_or_given_twice_is_refused(text):
    with pytest.raises(ConfigError):
        parse(text)


def test_a_number_of_too_many_digits_is_refused():
    with pytest.raises(ConfigError):
        parse_value("9" * 5000)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("a:top_n=3", MethodSpec("a", {"top_n": 3})),
        ("a:text=p+q", MethodSpec("a", {"text": "p+q"})),
        ("a+b:top_n=3", MethodSpec("fused", {"scorers": ["a", "b"], "top_n": 3})),
        ("fused:a+b", MethodSpec("fused", {"scorers": ["a", "b"]})),
        ("fused:scorers=[]", MethodSpec("fused", {"scorers": []})),
    ],
)
def test_scorers_with_a_plus_are_fused(text, spec):
    assert read_reranker(text) == named_method(text, "reranker") == spec


def test_a_method_is_named_by_a_spec_or_a_text():
    spec = MethodSpec("x", {"a": 1})
    assert named_method(spec, "mitigation") is spec
    assert named_method("x:a=1", "mitigation") == spec
    assert named_method("a+b", "order") == MethodSpec("a+b")
    for nothing in (" ", None):
        with pytest.raises(ConfigError):
            named_method(nothing, "order")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", (None, "original", MethodSpec("none"))),
        ("//none", (None, "original", MethodSpec("none"))),
        ("a / reverse:base=x / m:e=2", (MethodSpec("a"), "reverse:base=x", MethodSpec("m", {"e": 2}))),
        ('a+b//m:p="/q"', (MethodSpec("fused", {"scorers": ["a", "b"]}), "original", MethodSpec("m", {"p": "/q"}))),
    ],
)
def test_an_arrangement_is_a_method_alone_or_reranker_order_and_method(text, expected):
    assert read_arrangement(text) == expected


@pytest.mark.parametrize("text", ["", "a/none", "a/reverse/", "a/b/c/none"])
def test_an_arrangement_of_two_parts_or_four_or_without_a_method_is_refused(text):
    with pytest.raises(ConfigError):
        read_arrangement(text)


@dataclass(frozen=True)
class Halving(Parametrised):
    """Halve the scores.

    Source: A. Author (2024), Halves,
        section 2, https://example.org/halves
    Differs from the paper: halves are rounded. They are
        drawn once.
    Cost: none.
    """

    name = "halving"

    share: Annotated[float, Number(0, 1)] = 0.5
    rounds: Annotated[int, Integer(1)] = 1


class Folklore(Parametrised):
    """Halve the scores. A Source: in a line, as https://example.org/halves, is no section.

    Source: told among colleagues.
    Differs from the paper: there is none.
    """


class Cited(Halving):
    """Halve the scores.

    Source: https://example.org/other
    Differs from the paper: in all.
    """

    paper = "a book"
    deviations = ("none that matter",)


def test_paper_and_deviations_are_those_of_the_docstring_or_of_the_class():
    assert Halving.paper == "A. Author (2024), Halves, section 2, https://example.org/halves"
    assert Halving.deviations == ("halves are rounded.", "They are drawn once.")
    assert (Folklore.paper, Folklore.deviations) == ("", ())
    assert (Cited.paper, Cited.deviations) == ("a book", ("none that matter",))


def test_the_label_of_a_method_has_the_parameters_that_differ_from_their_defaults():
    assert Halving().label == "halving"
    assert Halving(share=0.25, rounds=1).label == "halving:share=0.25"
    assert Halving(rounds=2).parameters == {"share": 0.5, "rounds": 2}
    with pytest.raises(ConfigError):
        Halving(rounds=0)
