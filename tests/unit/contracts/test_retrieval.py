"""The filter language: what matches, what is refused, and the text of a filter in a cache key."""

import copy

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.retrieval import (
    arerank_indexed,
    combine_filters,
    filter_key,
    matches,
    parse_filter,
    read_filter,
    rerank_indexed,
)
from rag_posfix.errors import ConfigError, RerankingError

BOOK = {"kind": "book", "year": 1999, "acl": ["staff", "board"], "draft": False, "note": None, "tags": []}


@pytest.mark.parametrize(
    ("metadata_filter", "expected"),
    [
        ({}, True),
        ({"kind": "book", "year": 1999.0}, True),
        ({"year": {"$gte": 1999, "$lt": 2000}}, True),
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
    ("operator", "expected"),
    [("$gt", [False, False, True]), ("$gte", [False, True, True]),
     ("$lt", [True, False, False]), ("$lte", [True, True, False])],
)  # fmt: skip
def test_range_has_the_numbers_and_texts_on_its_side_of_the_bound(operator, expected):
    for bound, values in ((1999, (1998.5, 1999.0, 2000)), ("book", ("atlas", "book", "map"))):
        condition = parse_filter({"field": {operator: bound}})
        assert [matches(condition, {"field": value}) for value in values] == expected


@pytest.mark.parametrize(
    "metadata_filter",
    [
        "kind=book",
        {"$where": "1"},
        {"$or": []},
        {"$and": {"a": 1}},
        {"$not": [{"a": 1}]},
        {"a": {}},
        {"a": {"$regex": "x"}},
        {"a": [[1]]},
        {"a": float("nan")},
        {"a": {"$gt": True}},
        {"a": {"$in": "xy"}},
        {"a": {"$exists": 1}},
        {1: 2},
        {"$and": [{"a": 1}] * 101},
        {"a": list(range(10_001))},
    ],
)
def test_malformed_filter_is_rejected(metadata_filter):
    with pytest.raises(ConfigError, match=r"^filter"):
        parse_filter(metadata_filter)


def test_filter_with_as_many_conditions_and_values_as_are_allowed_is_accepted():
    assert matches(parse_filter({"$and": [{"a": 1}] * 100}), {"a": 1})
    assert matches(parse_filter({"a": list(range(10_000))}), {"a": 9_999})


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


class ByLength(BaseDocumentCompressor):
    """Returns new documents, the longest first, at most ``top_n``."""

    top_n: int = 10

    def compress_documents(self, documents, query, callbacks=None):
        scored = [
            Document(id=d.id, page_content=d.page_content, metadata={**d.metadata, "relevance_score": 0.5})
            for d in sorted(documents, key=lambda d: -len(d.page_content))
        ]
        return scored[: self.top_n]


class Unchanged(BaseDocumentCompressor):
    """Returns the very documents that it was given."""

    def compress_documents(self, documents, query, callbacks=None):
        return documents


class Forgetful(BaseDocumentCompressor):
    """Drops the metadata."""

    def compress_documents(self, documents, query, callbacks=None):
        return [Document(page_content=d.page_content, metadata={"relevance_score": 1.0}) for d in documents]


class Refusing(BaseDocumentCompressor):
    def compress_documents(self, documents, query, callbacks=None):
        raise LookupError("called without documents")


GIVEN = [
    Document(id="same", page_content="a", metadata={"tags": ["t"]}),
    Document(id="same", page_content="ccc"),
    Document(page_content="bb"),
]


async def test_each_document_has_its_index_in_the_order_of_the_reranker():
    before = copy.deepcopy(GIVEN)
    for ranked in (rerank_indexed(ByLength(), "why?", GIVEN), await arerank_indexed(ByLength(), "why?", GIVEN)):
        assert [(one.index, one.document.page_content) for one in ranked] == [(1, "ccc"), (2, "bb"), (0, "a")]
        assert [one.document.metadata for one in ranked] == [
            {"relevance_score": 0.5},
            {"relevance_score": 0.5},
            {"tags": ["t"], "relevance_score": 0.5},
        ]
    assert before == GIVEN


def test_a_reranker_may_return_fewer_documents():
    assert [one.index for one in rerank_indexed(ByLength(top_n=1), "why?", GIVEN)] == [1]


def test_equal_documents_are_told_apart_and_copies_are_returned():
    given = [Document(page_content="x"), Document(page_content="x")]
    ranked = rerank_indexed(Unchanged(), "why?", given)
    assert [one.index for one in ranked] == [0, 1]
    assert [one.document for one in ranked] == given
    assert all(one.document is not other for one in ranked for other in given)


def test_without_documents_the_reranker_is_not_called():
    assert rerank_indexed(Refusing(), "why?", []) == []


async def test_a_reranker_that_drops_metadata_is_named():
    message = "Forgetful returned a document without the metadata that it was given .relevance_score is left.;"
    with pytest.raises(RerankingError, match=message):
        rerank_indexed(Forgetful(), "why?", GIVEN)
    with pytest.raises(RerankingError, match=message):
        await arerank_indexed(Forgetful(), "why?", GIVEN)


def test_documents_that_were_built_without_validation_are_passed_on():
    none = Document.model_construct(id="n", page_content=None, metadata=None)
    assert rerank_indexed(Unchanged(), "why?", [none])[0].document.metadata == {}
