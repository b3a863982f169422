"""The Haystack component in the real Haystack."""

import math

import pytest
from haystack import Document, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.components.rankers import LostInTheMiddleRanker
from haystack.utils.filters import document_matches_filter
from langchain_core.documents import BaseDocumentCompressor

from rag_posfix.adapters.document_ordering import create_reranker
from rag_posfix.adapters.haystack import PosfixRanker
from rag_posfix.assembly.orders import permute
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import ranked_copies
from tests.support.letter_embeddings import LetterEmbeddings


class ByLength(BaseDocumentCompressor):
    """Likes long documents."""

    def compress_documents(self, documents, query, callbacks=None):
        return ranked_copies(documents, [len(d.page_content) / 100 for d in documents])


def ranked(n):
    return [Document(content=f"text {i}", id=str(i), score=1 - i / 100) for i in range(n)]


def ids(output):
    return [document.id for document in output["documents"]]


@pytest.mark.parametrize("n", [1, 2, 3, 8, 11])
def test_ends_first_is_the_order_of_lost_in_the_middle_ranker(n):
    theirs = ids(LostInTheMiddleRanker().run(documents=ranked(n)))
    assert ids(PosfixRanker(order="ends_first").run(documents=ranked(n))) == theirs
    unscored = [Document(content=one.content, id=one.id) for one in ranked(n)]
    assert ids(PosfixRanker().run(documents=unscored)) == theirs
    assert [str(i) for i in permute("ends_first", [None] * n)] == theirs


def test_unlike_it_the_given_order_does_not_matter_where_there_are_scores():
    shuffled = [ranked(5)[i] for i in (3, 0, 4, 2, 1)]
    assert ids(PosfixRanker().run(documents=shuffled)) == ["0", "2", "4", "3", "1"]
    assert ids(LostInTheMiddleRanker().run(documents=shuffled)) == ["3", "4", "1", "2", "0"]


def test_the_best_are_kept_by_the_component_or_by_the_call():
    ranker = PosfixRanker(order="reverse", top_k=3)
    assert ids(ranker.run(documents=ranked(6))) == ["2", "1", "0"]
    assert ids(ranker.run(documents=ranked(6), top_k=1)) == ["0"]


def test_a_reranker_scores_first_and_documents_stay_as_they_were():
    documents = [Document(content=text, id=text, score=0.5, meta={"page": 1}) for text in ("a", "ccc", "bb")]
    before = [document.to_dict() for document in documents]
    output = PosfixRanker(order="relevance", reranker=ByLength()).run(documents=documents, query="Which?")
    assert [(one.id, one.score, one.meta) for one in output["documents"]] == [
        ("ccc", 0.03, {"page": 1}), ("bb", 0.02, {"page": 1}), ("a", 0.01, {"page": 1}),
    ]  # fmt: skip
    assert [document.to_dict() for document in documents] == before


async def test_it_runs_in_a_pipeline_both_ways():
    pipeline = Pipeline()
    pipeline.add_component("joiner", DocumentJoiner())
    pipeline.add_component("ranker", PosfixRanker(reranker=ByLength(), top_k=2))
    pipeline.connect("joiner.documents", "ranker.documents")
    texts = [Document(content="x" * (i + 1), id=str(i)) for i in range(4)]
    given = {"joiner": {"documents": texts}, "ranker": {"query": "Which?"}}
    assert ids(pipeline.run(given)["ranker"]) == ["3", "2"]
    assert ids((await pipeline.run_async(given))["ranker"]) == ["3", "2"]


def test_it_goes_through_yaml_and_back():
    pipeline = Pipeline()
    pipeline.add_component("ranker", PosfixRanker("profile:slots=[0.1,0.9]", "embedding:top_n=4", 3, 7, "m", "n"))
    trusted = ["rag_posfix.adapters.haystack"]
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=trusted).get_component("ranker")
    assert again.to_dict()["init_parameters"] == {
        "order": "profile:slots=[0.1,0.9]", "reranker": "embedding:top_n=4", "top_k": 3, "seed": 7,
        "embedding_model": "m", "model": "n",
    }  # fmt: skip
    assert again.to_dict()["type"] == "rag_posfix.adapters.haystack.PosfixRanker"


def test_a_reranker_object_cannot_be_serialised():
    with pytest.raises(ConfigError, match="a ByLength object cannot be serialised; give the reranker by name"):
        PosfixRanker(reranker=ByLength()).to_dict()


def test_models_are_loaded_when_warming_up_and_once(monkeypatch):
    asked = []

    def create(reranker, embedding_model, model):
        asked.append((reranker, embedding_model, model))
        return ByLength()

    monkeypatch.setattr("rag_posfix.adapters.haystack.create_reranker", create)
    ranker = PosfixRanker(reranker="embedding", embedding_model="m")
    assert asked == []
    ranker.warm_up()
    ranker.warm_up()
    ranker.run(documents=ranked(2), query="q")
    assert asked == [("embedding", "m", "smollm2")]


def test_a_reranker_is_found_by_name(monkeypatch):
    def embeddings(name, **_options):
        return LetterEmbeddings(name)

    monkeypatch.setattr("rag_posfix.pipeline.build.SentenceEmbeddings", embeddings)
    reranker = create_reranker("embedding:top_n=2", "letters", "smollm2")
    assert (reranker.top_n, reranker.embeddings.identity) == (2, "letters")
    assert create_reranker(None, "", "") is None
    with pytest.raises(ConfigError, match="unknown reranker 'embeding'"):
        create_reranker("embeding", "minilm", "smollm2")


class TestBadInput:
    def test_no_documents_are_no_documents(self):
        assert PosfixRanker(reranker=ByLength()).run(documents=[]) == {"documents": []}

    @pytest.mark.parametrize(
        ("options", "asked", "message"),
        [
            ({}, {"documents": [Document(id="x", meta={"only": "meta"})]}, "document 'x' has no text"),
            ({}, {"documents": [Document(content="x", score=math.nan)]}, "must be a finite number"),
            ({"reranker": ByLength()}, {"documents": ranked(2), "query": " "}, "a reranker needs the question"),
            ({}, {"documents": ranked(2), "top_k": 0}, "top_k=0"),
            ({"top_k": 0}, {"documents": []}, "top_k=0"),
            ({"order": "best"}, {"documents": []}, "unknown order"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, options, asked, message):
        with pytest.raises(ConfigError, match=message):
            PosfixRanker(**options).run(**asked)


@pytest.mark.parametrize(
    "filters",
    [
        {"year": {"$gte": 1999}, "kind": ["book", "map"]},
        {
            "operator": "AND",
            "conditions": [
                {"field": "meta.year", "operator": ">=", "value": 1999},
                {"operator": "NOT", "conditions": [{"field": "meta.kind", "operator": "not in", "value": ["map"]}]},
            ],
        },
    ],
)
def test_documents_that_do_not_match_the_filters_are_left_out(filters):
    metas = ({"year": 1999, "kind": "map"}, {"year": 1998, "kind": "map"}, {"year": 2000, "kind": "song"}, {})
    documents = [Document(content=f"text {i}", id=str(i), meta=meta) for i, meta in enumerate(metas)]
    assert ids(PosfixRanker(filters=filters).run(documents=documents)) == ["0"]
    assert ids(PosfixRanker().run(documents=documents, filters=filters)) == ["0"]
    narrower = {"field": "year", "operator": "!=", "value": 1999}
    ranker = PosfixRanker.from_dict(PosfixRanker(filters=filters).to_dict())
    assert ids(ranker.run(documents=documents, filters=narrower)) == []


FILTERED = [
    Document(content="a", id="1", meta={"year": 1999, "a": {"b": 1}, "tags": ["x"]}, score=0.5),
    Document(content="b", id="2", meta={"year": None, "published": "2024-01-01"}, score=0.7),
    Document(content="c", id="3", score=0.1),
]


def condition(field, operator, value):
    return {"field": field, "operator": operator, "value": value}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (condition("meta.year", "!=", 1999), ["2", "3"]),
        (condition("meta.a.b", "==", 1), ["1"]),
        (condition("score", ">", 0.4), ["1", "2"]),
        (condition("meta.year", "in", [1999, None]), ["1", "2", "3"]),
        (condition("year", ">", 1990), ["1"]),
        (condition("meta.published", "<", "2025-01-01"), ["2"]),
        (condition("meta.tags", "==", ["x"]), ["1"]),
        ({"operator": "NOT", "conditions": [condition("meta.year", "==", 1999)]}, ["2", "3"]),
        ({"operator": "OR", "conditions": [condition("id", "==", "3"), condition("meta.a.b", "==", 1)]}, ["1", "3"]),
    ],
)
async def test_filters_in_haystacks_form_keep_what_haystack_keeps(filters, expected):
    assert [one.id for one in FILTERED if document_matches_filter(filters, one)] == expected
    assert sorted(ids(PosfixRanker(filters=filters).run(FILTERED))) == expected
    assert sorted(ids(await PosfixRanker().run_async(FILTERED, filters=filters))) == expected


@pytest.mark.parametrize(
    "filters",
    [
        condition("meta.a", "like", 1), {"operator": "XOR", "conditions": []}, condition("meta.a", "in", 1),
        {"operator": "AND", "conditions": 5}, {"operator": "AND", "conditions": ["year"]},
        {"operator": "AND", "conditions": [condition("meta.a", "==", 1), condition("meta.a", "~", 1)]},
        condition(5, "==", 1), {"meta.a": {"$nor": 1}}, 5,
    ],
)  # fmt: skip
def test_filters_that_are_none_are_refused(filters):
    with pytest.raises(ConfigError, match="filter"):
        PosfixRanker(filters=filters)
    with pytest.raises(ConfigError, match="filter"):
        PosfixRanker().run(FILTERED, filters=filters)


def test_a_filter_that_compares_values_of_different_types_is_an_error_where_it_meets_them():
    ranker = PosfixRanker(filters=condition("meta.year", ">", "recently"))
    with pytest.raises(ConfigError, match="cannot be evaluated by Haystack: Can't compare strings"):
        ranker.run(FILTERED)
