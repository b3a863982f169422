"""How much more likely a passage makes the question."""

import math

import pytest
from langchain_core.documents import Document

from rag_posfix.reranking.likelihood import PassageJudge
from tests.support.reader import ScriptedReader, order, raw, scores


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def test_the_gain_is_the_log_probability_after_the_passage_less_that_without_one():
    reader = ScriptedReader({"": -3.0, "a": -2.0, "b": -3.5})
    result = PassageJudge(generator=reader).compress_documents(documents("b", "a"), "why?")
    assert order(result) == ["a", "b"]
    assert raw(result) == {"a": 1.0, "b": -0.5}
    assert scores(result)["a"] == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_passage_that_repeats_the_question_is_judged_as_it_is():
    question = "why is the sky blue over here?"
    reader = ScriptedReader({"": -3.0, question: -1.0})
    assert raw(PassageJudge(generator=reader).compress_documents(documents(question), question)) == {question: 2.0}


def test_a_judgement_is_remembered_for_its_question_alone():
    reader = ScriptedReader({"": -3.0, "a": -2.0, "b": -1.0})
    judge = PassageJudge(generator=reader)
    judge.compress_documents(documents("a"), "why?")
    assert raw(judge.compress_documents(documents("a", "b"), "why?")) == {"a": 1.0, "b": 2.0}
    judge.compress_documents(documents("a"), "how?")
    assert reader.seen == [["a"], ["b"], ["a"]]
