"""The filter language: what matches, what is refused, and the text of a filter in a cache key."""

import pytest

from rag_posfix.contracts.filters import combine_filters, filter_key, matches, parse_filter, read_filter
from rag_posfix.errors import ConfigError

BOOK = {"kind": "book", "year": 1999, "acl": ["staff", "board"], "draft": False, "note": None, "tags": []}


@pytest.mark.parametrize(
    ("metadata_filter", "expected"),
    [
        ({}, True),
        ({"kind": "book", "year": 1999.0}, True),
        ({"year": {"$gte": 1999, "$lt": 2000}}, True),
        ({"year": {"$gt": 1999}}, False),
        ({"year": {"$lte": 1998.5}}, False),
        ({"year": {"$gte": "1"}}, False),
        ({"kind": {"$gte": "b", "$lt": "c"}}, True),
        ({"draft": {"$gte": 0}}, False),
        ({"draft": 0}, False),
        ({"acl": "staff"}, True),
        ({"acl": ["guests", "board"]}, True),
        ({"acl": {"$nin": ["board"]}}, False),
        ({"note": None}, True),
        ({"missing": None}, False),
        ({"missing": {"$ne": 1}}, True),
        ({"$not": {"missing": {"$gt": 1}}}, True),
        ({"kind": {"$exists": True}, "note": {"$exists": False}, "tags": {"$exists": False}}, True),
        ({"$or": [{"kind": "map"}, {"$and": [{"year": 1999}, {"acl": {"$in": ["board"]}}]}]}, True),
        ({"kind": []}, False),
    ],
)
def test_filter_matches_metadata_as_its_operators_state(metadata_filter, expected):
    assert matches(parse_filter(metadata_filter), BOOK) is expected


@pytest.mark.parametrize(
    ("metadata_filter", "problem"),
    [
        ([], "is a list"),
        ({"$where": "1"}, "'\\$where' is not understood"),
        ({"$or": []}, "one or more filters"),
        ({"$and": {"a": 1}}, "one or more filters"),
        ({"$not": [{"a": 1}]}, "filter.\\$not=.* is a list"),
        ({"a": {}}, "'a': {} is not understood"),
        ({"a": {"$regex": "x"}}, "'\\$regex' is not understood; use one of \\$eq"),
        ({"a": [[1]]}, "\\[1\\] is not understood"),
        ({"a": float("nan")}, "nan is not understood"),
        ({"a": {"$gt": True}}, "must be a finite number or a text"),
        ({"a": {"$in": "xy"}}, "must be a list"),
        ({"a": {"$exists": 1}}, "must be true or false"),
        ({1: 2}, "1 is not understood"),
        ({"$and": [{"a": 1}] * 101}, "101 conditions, at most 100"),
        ({"a": list(range(10_001))}, "10001 allowed values, at most 10000"),
    ],
)
def test_malformed_filter_is_rejected_with_its_problem(metadata_filter, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_filter(metadata_filter)


def test_deeply_nested_filter_is_rejected():
    metadata_filter = {"a": 1}
    for _ in range(5000):
        metadata_filter = {"$not": metadata_filter}
    with pytest.raises(ConfigError, match="more than 32 levels"):
        parse_filter(metadata_filter)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind=book", {"kind": "book"}),
        ("url=a=b", {"url": "a=b"}),
        ('{"year": {"$gte": 1999}}', {"year": {"$gte": 1999}}),
        ('acl=["a", "b"]', {"acl": ["a", "b"]}),
    ],
)
def test_filter_of_the_command_line_is_json_or_an_equality(text, expected):
    assert read_filter(text) == expected


@pytest.mark.parametrize("text", ["book", "=book", "{", "[1]", '{"$nor": []}'])
def test_other_text_is_no_filter(text):
    with pytest.raises(ConfigError, match="filter"):
        read_filter(text)


def test_joined_filters_match_what_each_of_them_matches():
    assert combine_filters(None, {}, None) is None
    assert combine_filters({"a": 1}, None) == {"a": 1}
    both = parse_filter(combine_filters({"a": 1}, {"$or": [{"a": 2}, {"b": 1}]}))
    assert not matches(both, {"a": 2, "b": 1})
    assert matches(both, {"a": 1, "b": 1})


def test_key_of_a_filter_depends_on_its_meaning_and_not_on_the_order_of_its_fields():
    assert filter_key(None) == filter_key({}) == ""
    assert filter_key({"a": 1, "b": [1, 2]}) == filter_key({"b": {"$in": [2, 1]}, "a": {"$eq": 1}})
    different = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": {"$ne": 1}}, {"a": {"$gt": 1}}, {"b": 1}, {"a": [1, 2]}]
    assert len({filter_key(each) for each in different}) == len(different)
