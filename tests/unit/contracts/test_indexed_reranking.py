import copy

import pytest
from langchain_core.documents import BaseDocumentCompressor, Document

from rag_posfix.contracts.retrieval import arerank_indexed, rerank_indexed
from rag_posfix.errors import RerankingError


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
