import copy
import itertools

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError, RerankingError
from rag_posfix.reranking import RERANKERS, EmbeddingReranker

TABLE = {
    "same": [2.0, 0.0],
    "near": [3.0, 4.0],
    "opposite": [-1.0, 0.0],
    "zero": [0.0, 0.0],
    "nearly": [0.6000001, 0.8],
    "nearer": [0.600001, 0.79999925],
    "\ufffd": [1.0, 1.0],
}


class TableEmbeddings(Embeddings):
    """Vectors from a table; the question is (1, 0)."""

    def embed_documents(self, texts):
        return [TABLE[text] for text in texts]

    def embed_query(self, text):
        return [1.0, 0.0]


def documents(*texts):
    return [Document(id=str(n), page_content=text, metadata={"tags": ["t"]}) for n, text in enumerate(texts)]


def ranked(result):
    return [(document.page_content, document.metadata["relevance_score"]) for document in result]


async def test_passages_are_scored_by_cosine_best_first():
    reranker = EmbeddingReranker(embeddings=TableEmbeddings())
    assert isinstance(reranker, Reranker)
    given = documents("opposite", "near", "zero", "same")
    # near = (3, 4): cosine with (1, 0) is 3/5; the zero vector and the opposite one score 0 and keep their order
    expected = [("same", 1.0), ("near", 0.6), ("opposite", 0.0), ("zero", 0.0)]
    assert ranked(reranker.compress_documents(given, "q")) == expected
    assert ranked(await reranker.acompress_documents(given, "q")) == expected


def test_the_given_documents_are_left_untouched():
    given = documents("near", "same")
    before = copy.deepcopy(given)
    result = EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents(given, "q")
    assert given == before
    assert result[0].id == "1"
    assert result[0].metadata["tags"] == ["t"]


def test_scores_that_differ_by_rounding_alone_are_equal_and_keep_the_given_order():
    # (.6000001, .8) has the cosine .60000006, and .600001 differs in the sixth digit.
    for texts in (("near", "nearly", "nearer"), ("nearly", "near", "nearer")):
        result = EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents(documents(*texts), "q")
        assert ranked(result) == [("nearer", 0.600001), (texts[0], 0.6), (texts[1], 0.6)]


def test_texts_are_embedded_in_one_order_whatever_the_order_of_the_documents():
    seen = []

    class Keeping(TableEmbeddings):
        def embed_documents(self, texts):
            seen.append(texts)
            return super().embed_documents(texts)

    for texts in itertools.permutations(("near", "same", "zero")):
        EmbeddingReranker(embeddings=Keeping()).compress_documents(documents(*texts), "q")
    assert seen == [["near", "same", "zero"]] * 6


def test_equal_scores_keep_the_given_order_and_top_n_cuts():
    reranker = EmbeddingReranker(embeddings=TableEmbeddings(), top_n=2)
    result = reranker.compress_documents(documents("zero", "near", "same", "same"), "q")
    assert [document.id for document in result] == ["2", "1"]
    every = reranker.model_copy(update={"top_n": None}).compress_documents(documents("near", "same", "same"), "q")
    assert [document.id for document in every] == ["1", "2", "0"]


async def test_nothing_to_score_is_nothing_scored():
    reranker = EmbeddingReranker(embeddings=TableEmbeddings())
    assert reranker.compress_documents([], "") == []
    assert await reranker.acompress_documents([], "") == []


def test_passages_without_text_score_zero():
    none = Document.model_construct(id="n", page_content=None, metadata=None)
    result = EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents([none, *documents("  ", "near")], "q")
    assert [(document.id, document.metadata["relevance_score"]) for document in result] == [
        ("1", 0.6),
        ("n", 0.0),
        ("0", 0.0),
    ]
    only_blank = EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents(documents(""), "q")
    assert ranked(only_blank) == [("", 0.0)]


def test_damaged_text_is_embedded_cleaned_and_returned_as_given():
    given = documents("\ud800")
    result = EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents(given, "q")
    assert ranked(result) == [("\ud800", pytest.approx(0.707107))]


def test_an_empty_question_is_refused():
    with pytest.raises(ConfigError, match="the question is empty"):
        EmbeddingReranker(embeddings=TableEmbeddings()).compress_documents(documents("near"), " ")


@pytest.mark.parametrize(
    ("vectors", "problem"),
    [([[float("nan"), 0.0]], "not finite"), ([[1.0]], "dimension 2 and 1"), ([], "0 vectors for 1 texts")],
)
def test_unusable_vectors_are_an_error(vectors, problem):
    class Broken(TableEmbeddings):
        def embed_documents(self, texts):
            return vectors

    with pytest.raises(RerankingError, match=problem):
        EmbeddingReranker(embeddings=Broken()).compress_documents(documents("x"), "q")


def test_top_n_below_one_is_refused():
    with pytest.raises(ValueError, match="top_n"):
        EmbeddingReranker(embeddings=TableEmbeddings(), top_n=0)


def test_it_is_registered():
    assert RERANKERS.get("embedding") is EmbeddingReranker
