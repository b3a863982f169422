import itertools
import math

import pytest
from langchain_core.documents import Document

from rag_posfix.errors import PromptTooLongError, RerankingError
from rag_posfix.reranking import LikelihoodReranker, language_model
from rag_posfix.reranking.likelihood import RESTRICTION
from tests.support.reader import ScriptedReader, order, raw, scores


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def test_the_score_is_the_geometric_mean_probability_of_the_questions_tokens():
    reader = ScriptedReader({"a": math.log(0.5), "b": math.log(0.25), "c": 0.0})
    result = LikelihoodReranker(generator=reader).compress_documents(documents("a", "b", "c"), "why?")
    assert order(result) == ["c", "a", "b"]
    assert scores(result) == pytest.approx({"c": 1.0, "a": 0.5, "b": 0.25})
    assert raw(result)["b"] == math.log(0.25)


def test_question_and_restriction_are_what_is_predicted_and_the_prompt_ends_there():
    layouts = []

    class Keeping(ScriptedReader):
        def question_likelihood(self, layout, salt=""):
            layouts.append(layout)
            return super().question_likelihood(layout, salt)

    reader = Keeping({"a": -1.0})
    LikelihoodReranker(generator=reader).compress_documents(documents("a"), "why?")
    LikelihoodReranker(generator=reader, restriction="").compress_documents(documents("a"), "why?")
    asked = [reader.encoder.decode(layout.tokens(layout.question)) for layout in layouts]
    assert asked == ["why?" + RESTRICTION, "why?"]
    assert all(layout.question.stop == len(layout.token_ids) for layout in layouts)
    assert reader.encoder.decode(layouts[0].tokens(layouts[0].suffix)).startswith("Question: why?")


def test_batches_hold_passages_of_like_length_whatever_their_order():
    texts = ["x" * n for n in range(1, 8)]
    seen = []
    for given in (texts, texts[::-1]):
        reader = ScriptedReader({text: -len(text) for text in texts})
        LikelihoodReranker(generator=reader, batch_size=3).compress_documents(documents(*given), "why?")
        seen.append(reader.seen)
    assert seen[0] == [texts[:3], texts[3:6], texts[6:]] == seen[1]


def test_batches_hold_the_same_passages_of_one_length_for_every_order():
    texts = ["aa", "bb", "cc", "d"]
    seen = set()
    for given in itertools.permutations(texts):
        reader = ScriptedReader(dict.fromkeys(texts, -1.0))
        LikelihoodReranker(generator=reader, batch_size=2).compress_documents(documents(*given), "why?")
        seen.add(tuple(map(tuple, reader.seen)))
    (batches,) = seen
    assert batches[0][0] == "d"  # the shortest; the others by content


def test_a_likelihood_above_1_is_rounding():
    result = LikelihoodReranker(generator=ScriptedReader({"a": 1e-7})).compress_documents(documents("a"), "why?")
    assert (scores(result), raw(result)) == ({"a": 1.0}, {"a": 1e-7})


@pytest.mark.parametrize(("bound", "batches"), [(0, [2]), (-1, [1, 1])])
def test_a_batch_may_have_exactly_the_tokens_of_the_bound(bound, batches, monkeypatch):
    layouts = []

    class Keeping(ScriptedReader):
        def question_likelihood(self, layout, salt=""):
            layouts.append(layout)
            return super().question_likelihood(layout, salt)

    reader = Keeping({"a" * 50: -1.0, "b" * 60: -1.0})
    reranker = LikelihoodReranker(generator=reader)
    reranker.compress_documents(documents(*reader.values), "why?")
    # Both are padded to the longer one, 60 letters and a separator of 2, with the suffix.
    monkeypatch.setattr(language_model, "MAX_TOKENS", 2 * (60 + 2 + len(layouts[0].suffix)) + bound)
    reader.seen.clear()
    reranker.compress_documents(documents(*reader.values), "why?")
    assert [len(texts) for texts in reader.seen] == batches


def test_batches_are_bounded_in_tokens():
    long = {"x" * 5000: -1.0, "y" * 5000: -2.0}
    reader = ScriptedReader(long)
    LikelihoodReranker(generator=reader).compress_documents(documents(*long), "why?")
    assert [len(texts) for texts in reader.seen] == [1, 1]


def test_a_document_longer_than_the_window_is_cut_and_says_so():
    seen = {}

    class Anything(dict):
        def __missing__(self, text):
            seen[text[0]] = len(text)
            return -1.0

    reader = ScriptedReader(Anything(), context_window=600)
    result = LikelihoodReranker(generator=reader).compress_documents(documents("x" * 5000, "y"), "why?")
    said = {one.page_content[0]: one.metadata["reranking"] for one in result}
    assert said["x"] == {"reranker": "likelihood", "raw_score": -1.0, "long_document": "truncated"}
    assert said["y"] == {"reranker": "likelihood", "raw_score": -1.0}
    assert len(result[0].page_content) == 5000, "the document itself is whole"
    assert 300 < seen["x"] < 600
    LikelihoodReranker(generator=reader, max_document_tokens=50).compress_documents(documents("x" * 5000), "why?")
    assert seen["x"] == 48, "the separator takes two"


def test_a_question_that_leaves_no_room_is_told():
    reader = ScriptedReader({}, context_window=300)
    with pytest.raises(PromptTooLongError, match="tokens are left for each document"):
        LikelihoodReranker(generator=reader).compress_documents(documents("x" * 100), "why? " * 40)


def test_numbers_that_are_none_are_an_error():
    with pytest.raises(RerankingError, match="likelihood: the model returned a score of nan"):
        LikelihoodReranker(generator=ScriptedReader({"a": math.nan})).compress_documents(documents("a"), "why?")


def test_sentences_that_copy_the_question_are_no_evidence():
    question = "who built the tower of stone"
    echo = f"Forum. {question}? Please help."
    reader = ScriptedReader({"Forum. Please help.": -3.0, "Ann built the tower.": -2.0, echo: -0.5, "": -4.0})
    given = [*documents(echo, "Ann built the tower."), Document(page_content=f"{question}?")]
    result = LikelihoodReranker(generator=reader).compress_documents(given, question)
    assert order(result) == ["Ann built the tower.", echo, f"{question}?"]
    assert raw(result) == {"Ann built the tower.": -2.0, echo: -3.0, f"{question}?": -4.0}
    assert [one.metadata["reranking"].get("question_copies") for one in result] == [None, "left out", "left out"]
    counted = LikelihoodReranker(generator=reader, question_copies=True).compress_documents(given[:2], question)
    assert order(counted) == [echo, "Ann built the tower."]
