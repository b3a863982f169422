"""Vector stores of other programs: their ids, scores and filters, on real ones and against their wire."""

from __future__ import annotations

import math
import re
import traceback
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from pytest_httpserver import HTTPServer

from rag_posfix.contracts.retrieval import matches, parse_filter
from rag_posfix.errors import ConfigError, VectorStoreError
from rag_posfix.retrieval import external_stores
from rag_posfix.retrieval.external_stores import (
    UntranslatableError,
    elasticsearch_filter,
    milvus_expression,
    open_external,
    postgres_clause,
)
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.postgres import pgvector_collection, postgres_server
from tests.support.random_filters import FILTERS, documents_with_metadata

DOCUMENTS = documents_with_metadata(24)
QUOTED = 'it\'s "q"'


def expected_ids(metadata_filter):
    condition = parse_filter(metadata_filter)
    return sorted(str(document.id) for document in DOCUMENTS if matches(condition, document.metadata))


def numbers(documents):
    return sorted(f"{document.metadata['number']:04}" for document in documents)


def check_filters(retriever, count):
    """Filters find exactly the documents that match."""

    @settings(max_examples=count, derandomize=True)
    @given(FILTERS)
    def check(metadata_filter):
        hits = retriever.retrieve("common words", 24, filter=metadata_filter)
        assert numbers(hits) == expected_ids(metadata_filter)

    check()


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory):
    from langchain_qdrant import QdrantVectorStore

    folder = tmp_path_factory.mktemp("qdrant")
    QdrantVectorStore.from_documents(
        DOCUMENTS, LetterEmbeddings(), path=str(folder), collection_name="docs", ids=list(range(24))
    ).client.close()
    return open_external(f"qdrant:path={folder},collection=docs", LetterEmbeddings(), 5)


class TestQdrant:
    def test_documents_have_the_ids_and_cosines_of_the_store(self, qdrant):
        hits = qdrant.retrieve("common words", 24)
        assert sorted(int(hit.id) for hit in hits) == list(range(24))
        assert not {"_id", "_collection_name"} & set(hits[0].metadata)
        # The letters of "common words 0" are those of the question: cosine 1 for each of them.
        assert [hit.metadata["relevance_score"] for hit in hits] == pytest.approx([1.0] * 24, abs=1e-5)
        (hit,) = qdrant.retrieve("cow", 1)
        letters = LetterEmbeddings().embed_query("common words")
        length = math.hypot(*letters)
        shared = sum(letters["abcdefghijklmnopqrstuvwxyz".index(letter)] for letter in "cow")
        assert hit.metadata["relevance_score"] == pytest.approx(shared / length / math.sqrt(3), abs=1e-5)
        assert len(qdrant.invoke("common words")) == 5

    def test_only_the_question_is_embedded(self, qdrant, monkeypatch):
        texts = []
        monkeypatch.setattr(LetterEmbeddings, "embed_documents", lambda self, given: texts.extend(given))
        qdrant.retrieve("common words", 3, filter={"year": 1999})
        assert texts == []

    @pytest.mark.slow
    def test_random_filters_find_exactly_the_documents_that_match(self, qdrant):
        check_filters(qdrant, 150)

    def test_filters_are_pushed_down_and_the_rest_is_checked(self, qdrant, monkeypatch):
        searches = []
        search = qdrant.store.search
        store = replace(qdrant.store, search=lambda *call: searches.append(call) or search(*call))
        recorded = qdrant.model_copy(update={"store": store})
        assert len(recorded.retrieve("common words", 3, filter={"number": {"$gte": 20}})) == 3
        ((_, width, argument),) = searches  # one search for three documents: Qdrant chose among those that match
        assert (width, argument.must[0].key, argument.must[0].range.gte) == (3, "metadata.number", 20)
        searches.clear()
        hits = recorded.retrieve("common words", 3, filter={"group": None, "number": {"$gte": 0}})
        assert all(hit.metadata["group"] is None for hit in hits)
        assert len(searches) > 1  # null is checked in the documents
        assert searches[0][2] is not None

    def test_points_without_text_are_passed_by_and_others_take_their_places(self, tmp_path):
        from qdrant_client import QdrantClient, models

        client = QdrantClient(path=str(tmp_path))
        vector = LetterEmbeddings().embed_query("pump")
        client.create_collection("docs", models.VectorParams(size=len(vector), distance=models.Distance.COSINE))
        payloads = [
            {}, {"page_content": None}, {"page_content": " "}, {"page_content": 7}, None,
            {"page_content": "pump a", "metadata": None},
            {"page_content": "pump b", "metadata": {"author": {"name": "Bo"}}},
        ]  # fmt: skip
        points = [models.PointStruct(id=n, vector=vector, payload=payload) for n, payload in enumerate(payloads)]
        client.upsert("docs", points)
        client.close()
        retriever = open_external(f"qdrant:path={tmp_path},collection=docs", LetterEmbeddings(), 5)
        assert sorted(hit.page_content for hit in retriever.retrieve("pump", 2)) == ["pump a", "pump b"]
        assert [hit.id for hit in retriever.retrieve("pump", 2, filter={"author.name": "Bo"})] == ["6"]

    def test_store_that_is_gone_is_told_without_its_address(self, tmp_path):
        with pytest.raises(VectorStoreError, match="the vector store qdrant failed with ") as caught:
            open_external(f"qdrant:path={tmp_path}/secret,collection=none", LetterEmbeddings(), 5)
        assert "secret" not in str(caught.value)


@pytest.fixture(scope="module")
def postgres():
    with postgres_server() as url:
        yield url


@pytest.fixture(scope="module")
def pgvector(postgres):
    pgvector_collection(postgres, DOCUMENTS, [str(number) for number in range(24)])
    yield (retriever := open_external(f"pgvector:url={postgres},collection=docs", LetterEmbeddings(), 5))
    retriever.store.vectors.session_maker().get_bind().dispose()


@pytest.fixture(scope="module")
def milvus(tmp_path_factory):
    """Milvus Lite, with a JSON field."""
    from langchain_milvus import Milvus

    address = str(tmp_path_factory.mktemp("milvus") / "docs.db")
    Milvus(
        LetterEmbeddings(), collection_name="docs", connection_args={"uri": address}, metadata_field="metadata",
        index_params={"metric_type": "COSINE", "index_type": "FLAT"},
    ).add_documents(DOCUMENTS, ids=[str(number) for number in range(24)])  # fmt: skip
    return open_external(f"milvus:url={address},collection=docs,metadata=metadata", LetterEmbeddings(), 5)


@pytest.mark.parametrize("name", ["pgvector", "milvus"])
@pytest.mark.slow
def test_ids_cosines_and_filters_of_a_real_store(name, request):
    retriever = request.getfixturevalue(name)
    retriever.check()
    hits = retriever.retrieve("cow", 24)
    assert sorted(int(hit.id) for hit in hits) == list(range(24))
    letters = LetterEmbeddings().embed_query("common words")
    shared = sum(letters["abcdefghijklmnopqrstuvwxyz".index(letter)] for letter in "cow")
    cosine = shared / math.hypot(*letters) / math.sqrt(3)
    assert [hit.metadata["relevance_score"] for hit in hits] == pytest.approx([cosine] * 24, abs=1e-5)
    check_filters(retriever, 100)


@pytest.mark.slow
def test_conditions_in_postgresql_hold_for_exactly_the_rows_that_match(postgres):
    import sqlalchemy
    from sqlalchemy.dialects.postgresql import JSONB

    engine = sqlalchemy.create_engine(postgres)
    table = sqlalchemy.Table(
        "passages", sqlalchemy.MetaData(), sqlalchemy.Column("id", sqlalchemy.Text), sqlalchemy.Column("meta", JSONB)
    )
    odd = [{"year": "1999"}, {"year": True}, {"year": {"a": 1}}, {"year": [5, "x"]}, {'it\'s "q"': 1}]
    rows = [document.metadata for document in DOCUMENTS] + odd
    with engine.connect() as connection:
        table.create(connection)
        connection.execute(table.insert(), [{"id": str(n), "meta": row} for n, row in enumerate(rows)])

        @settings(max_examples=200, derandomize=True)
        @given(FILTERS)
        @example({'it\'s "q"': {"$gte": 1}})
        @example({"year": {"$gte": "1"}})
        @example({'it\'s "q"': 1})
        @example({"$not": {"year": {"$gt": 0}}})
        def check(metadata_filter):
            condition = parse_filter(metadata_filter)
            query = sqlalchemy.select(table.c.id).where(postgres_clause(condition, table.c.meta))
            hits = sorted(int(identity) for (identity,) in connection.execute(query))
            assert hits == [n for n, row in enumerate(rows) if matches(condition, row)]

        check()
    engine.dispose()


ELASTIC = {
    "headers": {"x-elastic-product": "Elasticsearch"},
    "content_type": "application/vnd.elasticsearch+json;compatible-with=8",
}


@pytest.fixture
def elasticsearch():
    """Answers as Elasticsearch 8.19 does."""
    hits = [
        {"_index": "notes", "_id": "a", "_score": 0.9, "_source": {"text": "A", "metadata": {"year": 1999}}},
        {"_index": "notes", "_id": "b", "_score": 0.4, "_source": {"text": "B", "metadata": {"year": 2001}}},
    ]
    found = {"took": 1, "timed_out": False, "hits": {"total": {"value": 2}, "hits": hits}}
    with HTTPServer(threaded=True) as server:
        server.expect_request("/notes/_search").respond_with_json(found, **ELASTIC)
        server.expect_request(re.compile("")).respond_with_json({"version": {"number": "8.19.0"}}, **ELASTIC)
        yield server


def test_elasticsearch_is_searched_as_its_recorded_wire_has_it(elasticsearch):
    store = open_external(f"elasticsearch:url={elasticsearch.url_for('')},index=notes", LetterEmbeddings(), 5)
    hits = store.retrieve("a question", 2, filter={"year": {"$lt": 2000}})
    assert [(hit.id, hit.metadata["relevance_score"]) for hit in hits] == [("a", 0.8)]  # and the other is left out
    store.check()
    store.retrieve("a question", 200)
    first, *_, last = (one.get_json(force=True)["knn"] for one, _ in elasticsearch.log if one.path == "/notes/_search")
    assert first["filter"] == [{"bool": {"filter": [{"range": {"metadata.year": {"lt": 2000}}}]}}]
    assert (first["k"], last["num_candidates"] >= 200) == (2, True)
    elasticsearch.clear()
    elasticsearch.expect_request(re.compile("")).respond_with_json({}, status=404, **ELASTIC)
    with pytest.raises(VectorStoreError, match="the vector store elasticsearch failed with NotFoundError"):
        store.check()


@pytest.mark.parametrize(
    ("metadata_filter", "expected"),
    [
        ({"kind": ["book", "map"]}, {"terms": {"metadata.kind.keyword": ["book", "map"]}}),
        ({"year": {"$ne": 1}}, {"bool": {"must_not": [{"terms": {"metadata.year": [1]}}]}}),
        ({"acl": {"$exists": True}}, {"exists": {"field": "metadata.acl"}}),
        ({"a": []}, {"match_none": {}}),
        ({}, {"match_all": {}}),
    ],
)
def test_conditions_for_elasticsearch_are_its_query_clauses(metadata_filter, expected):
    assert elasticsearch_filter(parse_filter(metadata_filter)) == expected


@pytest.mark.parametrize("metadata_filter", [{"a": None}, {"a": ["x", 1]}, {"a": "x" * 257}, {"a": {"$gt": "x"}}])
def test_what_elasticsearch_cannot_state_is_left_to_the_check(metadata_filter):
    with pytest.raises(UntranslatableError):
        elasticsearch_filter(parse_filter(metadata_filter))


def test_conditions_for_milvus_look_into_lists_and_leave_negations_out():
    assert milvus_expression(parse_filter({"acl": 'a"b'})) == (
        '((metadata["acl"] == "a\\"b" or json_contains(metadata["acl"], "a\\"b")))'
    )
    for metadata_filter in (
        {"a": {"$ne": 1}},
        {"a": {"$gt": 1}},
        {"a": -1},
        {"a": None},
        {"a": []},
        {"a": {"$exists": True}},
    ):
        with pytest.raises(UntranslatableError):
            milvus_expression(parse_filter(metadata_filter))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pinecone:index=a", "unknown retriever 'pinecone'; choose auto, dense, bm25, hybrid, or"),
        ("qdrant:url=http://x", "retriever qdrant lacks collection; it takes collection and, if needed, api_key"),
        ("qdrant:collection=a", "takes url or path"),
        ("qdrant:collection=a,color=red", "has no option 'color'"),
        ("qdrant:collection", "must be key=value"),
        ("pgvector:url=x,url=y,collection=a", "each key once"),
    ],
)
def test_malformed_address_of_a_store_is_rejected(text, problem):
    with pytest.raises(ConfigError, match=problem):
        open_external(text, LetterEmbeddings(), 5)


@pytest.mark.parametrize("password", ["a,hunter2", "a,@hunter2=", "{hunter2", "hunter2]", "a,b=1,b=hunter2"])
def test_an_error_about_an_address_shows_no_password(password):
    with pytest.raises(ConfigError, match=r"^retriever pgvector: .* into double quotes") as caught:
        open_external(f"pgvector:url=postgresql://rag:{password}@db,collection=a", LetterEmbeddings(), 5)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


class Plugin:
    """An entry point; langchain's store in memory has no relevance scores of its own."""

    name = "shelf"

    def __init__(self, opened):
        self.opened = opened

    def load(self):
        return lambda embeddings, **options: self.opened(embeddings, options)


def test_plugins_open_stores_retrievers_and_objects(monkeypatch):
    received = []

    class Scored(InMemoryVectorStore):
        def _select_relevance_score_fn(self):
            return lambda score: score

    def store(embeddings, options):
        received.append(options)
        made = Scored(embeddings)
        made.add_documents(DOCUMENTS)
        return made

    for opened in (store, lambda e, o: store(e, o).as_retriever(search_kwargs={"k": 24})):
        monkeypatch.setattr(external_stores, "entry_points", lambda group, opened=opened: [Plugin(opened)])
        retriever = open_external('shelf:path=/a,names="x,y"', LetterEmbeddings(), 5)
        assert numbers(retriever.retrieve("common", 24, filter={"year": 1999})) == expected_ids({"year": 1999})
    assert received[0] == {"path": "/a", "names": "x,y"}
    monkeypatch.setattr(
        external_stores, "entry_points", lambda group: [Plugin(lambda e, o: Document(page_content="x"))]
    )
    with pytest.raises(ConfigError, match="the plugin returned Document"):
        open_external("shelf:", LetterEmbeddings(), 5)
