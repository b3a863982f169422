import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.adapters.document_ordering import (
    DocumentOrderer,
    FrameworkDocument,
    OrderedDocument,
    checked_count,
    checked_order,
    ordered_documents,
)
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import ranked_copies


class ByLength(BaseDocumentCompressor):
    """Scores long documents high, and returns at most ``top_n``."""

    top_n: int | None = None

    def compress_documents(self, documents, query, callbacks=None):
        return ranked_copies(documents, [len(d.page_content) / 10 for d in documents])[: self.top_n]


GIVEN = [
    FrameworkDocument("x", "a", score=0.2),
    FrameworkDocument("x", "ccc", "title", 0.9),
    FrameworkDocument("", "bb", score=0.5),
]


async def test_documents_are_ordered_by_their_own_scores_without_a_reranker():
    expected = [OrderedDocument(1, 0.9), OrderedDocument(2, 0.5)]
    assert DocumentOrderer(k=2).run(GIVEN) == await DocumentOrderer(k=2).arun(GIVEN) == expected


async def test_a_reranker_replaces_the_scores_and_may_drop_documents():
    orderer = DocumentOrderer("reverse", ByLength(top_n=2))
    expected = [OrderedDocument(2, 0.2), OrderedDocument(1, 0.3)]
    assert orderer.run(GIVEN, "why?") == await orderer.arun(GIVEN, "why?") == expected


def test_ties_keep_the_given_order_whatever_the_order_of_the_reranker():
    class Reversing(BaseDocumentCompressor):
        def compress_documents(self, documents, query, callbacks=None):
            return documents[::-1]

    given = [FrameworkDocument(str(n), f"text {n}") for n in range(3)]
    found = DocumentOrderer("original", Reversing()).run(given, "why?")
    assert found == [OrderedDocument(0, None), OrderedDocument(1, None), OrderedDocument(2, None)]


@pytest.mark.parametrize("query", [None, "", " "])
async def test_a_reranker_needs_a_question_unless_there_are_no_documents(query):
    orderer = DocumentOrderer(reranker=ByLength())
    with pytest.raises(ConfigError, match="a reranker needs the question"):
        orderer.run(GIVEN, query)
    with pytest.raises(ConfigError, match="a reranker needs the question"):
        await orderer.arun(GIVEN, query)
    assert orderer.run([], query) == []


@pytest.mark.parametrize(("text", "kind"), [(None, "no text"), (7, "int, must be text")])
def test_content_that_is_no_text_is_refused(text, kind):
    with pytest.raises(ConfigError, match=f"document 'x' has {kind}"):
        DocumentOrderer().run([FrameworkDocument("x", text)])


def test_ordered_documents_are_the_given_objects_and_duplicates_go_unless_kept():
    given = [Document(page_content=text, metadata={"relevance_score": score}) for text, score in
             (("same", 0.1), ("same ", 0.9), (" ", 0.8), ("other", 0.5))]  # fmt: skip
    found = ordered_documents(given, "relevance")
    assert [id(one) for one in found] == [id(given[1]), id(given[3])]
    assert len(ordered_documents(given, "relevance", distinct=False)) == 4
    assert ordered_documents(given, "relevance", k=1) == [given[1]]


def test_the_best_are_kept_before_they_are_ordered():
    given = [Document(page_content=f"text {n}", metadata={"relevance_score": n / 10}) for n in range(5)]
    assert ordered_documents(given, "original", k=2) == given[3:]


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ConfigError, match=r"k=.* must be an integer >= 1, or None for all"):
        checked_count("k", count)
    checked_count("k", None)


def test_an_order_is_checked_with_its_parameters():
    assert checked_order("cache_aware:bound=0.5") == "cache_aware:bound=0.5"
    with pytest.raises(ConfigError, match="bound=7 must be"):
        checked_order("cache_aware:bound=7")
