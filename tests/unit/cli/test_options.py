import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.cli.options import checked_choices, split_outside
from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.errors import ConfigError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("a,,", ["a", "", ""]),
        ("a:x=[1,2],b", ["a:x=[1,2]", "b"]),
        ('a:x=["p,q","r"],b', ['a:x=["p,q","r"]', "b"]),
        ('a:x=["]"],b', ['a:x=["]"]', "b"]),
        (r'a:x="\",",b', [r'a:x="\","', "b"]),
        ('a:x={"k":[1,{"l":2}]},b', ['a:x={"k":[1,{"l":2}]}', "b"]),
    ],
)
def test_a_separator_inside_of_brackets_or_quotes_does_not_split(text, parts):
    assert split_outside(text, ",") == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:x=[1,2", "lacks a closing ]"),
        ("a:x=1]", "has a ] that closes nothing"),
        ('a:x=[{"k":1]}', "has a ] that closes nothing"),
        ('a:x="b,c', 'lacks a closing "'),
        ('a:x="b\\"', 'lacks a closing "'),
        ('a:x="b\\', 'lacks a closing "'),
    ],
)
def test_what_is_never_closed_or_opened_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        split_outside(text, ",")


@pytest.mark.parametrize(
    ("text", "name", "parameters"),
    [
        ("none", "none", {}),
        (" x:a=1:b=two:c=true:d=null ", "x", {"a": 1, "b": "two", "c": True, "d": None}),
        ("multi_base:factors=[1.0,1.3]", "multi_base", {"factors": [1.0, 1.3]}),
        ('stack:methods=["a:x=[1,2]","b"]:y=1', "stack", {"methods": ["a:x=[1,2]", "b"], "y": 1}),
        ('x:path="/a:b"', "x", {"path": "/a:b"}),
        ("x:path=/a/b.json", "x", {"path": "/a/b.json"}),
    ],
)
def test_a_choice_is_a_name_and_values_in_json_or_plain_words(text, name, parameters):
    assert parse_method(text, "mitigation", "experts=5") == MethodSpec(name, parameters)


def test_several_choices_are_split_at_commas_and_checked():
    found = checked_choices("none,context_experts:experts=2,context_experts")
    assert [(c.name, c.parameters) for c in found] == [
        ("none", {}), ("context_experts", {"experts": 2}), ("context_experts", {})
    ]  # fmt: skip
    with pytest.raises(UnknownNameError, match=r"unknown mitigation 'pines'\. Did you mean 'pine' \(inter_document\)"):
        checked_choices("none,pines")
    assert checked_choices("pine")[0].name == "inter_document"


def test_a_choice_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="has 'none' twice with the same parameters; remove one"):
        checked_choices("none,context_experts, none")
    with pytest.raises(ConfigError, match="has 'inter_document' twice"):
        checked_choices("pine,inter_document")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), VALUES, max_size=3))
def test_a_label_is_read_back_as_the_choice_that_it_names(parameters):
    choice = MethodSpec("some_method", parameters)
    assert parse_method(choice.label, "mitigation", "experts=5") == choice
    assert split_outside(f"none,{choice.label}", ",") == ["none", choice.label]
