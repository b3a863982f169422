"""Passages that disagree: which are asked again, what counts as a contradiction, and which side is the newer."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.pipeline.disagreement import contradicts, list_disagreements, rival_answers
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.pipeline.support import SupportTest
from rag_posfix.reranking.yes_no import YesNoReranker
from tests.support.reader import ScriptedReader
from tests.support.serving import DictCache

ASKED = "What is the notice period?"
OLD = "The notice period is 21 days."
NEW = "The notice period is 30 days."
SAME = "Notice is given 21 days ahead."
OTHER = "The canteen opens on Monday."
PASSAGES = [OLD, NEW, SAME, OTHER]


@pytest.mark.parametrize(
    ("one", "other", "is_contradiction"),
    [
        ("21 days", "30 days", True),
        ("21 days", "21 days from the first of the month", False),
        ("In Rome.", "In Oslo.", True),
        ("In Rome.", "In the north of Rome.", False),
        ("Yes.", "21 days", False),
    ],
)
def test_other_numbers_or_no_word_in_common_are_a_contradiction(one, other, is_contradiction):
    assert contradicts(one, other, ASKED) is contradicts(other, one, ASKED) is is_contradiction


def rivals(odds, answers=None, answer="It is 21 days."):
    asked = []

    def answer_alone(index):
        asked.append(index)
        return (answers or {}).get(index, PASSAGES[index])

    return rival_answers(answer, ASKED, PASSAGES, odds, answer_alone), asked


def test_only_a_passage_with_an_answer_and_without_this_one_is_asked():
    assert rivals([5.0, 4.0, 3.0, -3.0]) == ([(NEW, 1)], [1])
    assert rivals([5.0, 0.5, 3.0, None]) == ([], []), "in doubt it is not asked"
    assert rivals([5.0, 4.0, 3.0, 9.0]) == ([(OTHER, 3), (NEW, 1)], [3, 1]), "the likeliest first"


def test_an_answer_that_its_own_passage_lacks_does_not_count():
    assert rivals([5.0, 4.0, 3.0, -3.0], {1: "40 days"}) == ([], [1])
    assert rivals([5.0, 4.0, 3.0, -3.0], {1: "\n"}) == ([], [1])


def test_an_answer_that_no_passage_has_is_compared_with_none():
    assert rivals([5.0, 4.0, 3.0, 3.0], answer="It is 40 days.") == ([], [])


def test_the_newest_side_comes_first_and_equal_answers_are_one_side():
    documents = [
        Document(page_content=text, metadata={"year": year}) for text, year in ((OLD, 2019), (NEW, 2024), (NEW, 2025))
    ]
    sides = list_disagreements("21 days", [0], [("30 days", 1), ("30 days", 2)], documents, ["a", "b", "c"])
    assert [(side.text, side.document_ids, side.date) for side in sides] == [
        ("30 days", ("b", "c"), "2025"), ("21 days", ("a",), "2019"),
    ]  # fmt: skip
    assert list_disagreements("21 days", [0], [], documents, ["a", "b", "c"]) == ()


def pipeline_of(cache=None):
    """A pipeline whose model answers with its first passage, and finds an answer in those about the notice."""
    odds = {OLD: 3.0, NEW: 3.0, OTHER: -3.0, "": 0.0}
    values = {text: {89: value, 121: -99.0, 78: 0.0, 110: -99.0} for text, value in odds.items()}
    reader = ScriptedReader(values, written=lambda texts: texts[0])
    judge = YesNoReranker(generator=ScriptedReader(values))
    assembler = Assembler(reader.encoder, reader.context_window)
    return Pipeline(reader, assembler, cache=cache, support=SupportTest(lambda: judge, is_trusted=True)), reader


def documents_of(*texts):
    years = {OLD: "2019", NEW: "2024", OTHER: "2020"}
    return [Document(page_content=text, id=text, metadata={"source": f"policy-{years[text]}.md"}) for text in texts]


@pytest.mark.parametrize("streams", [False, True])
def test_both_sides_are_told_with_their_sources_the_newer_first(streams):
    pipeline, reader = pipeline_of(DictCache())
    question = Question(ASKED, documents_of(OLD, NEW, OTHER), order="original", mitigation="none")
    for is_cached in (False, True):
        answer = list(pipeline.stream(question))[-1].answer if streams else pipeline.ask(question)
        assert (answer.text, answer.cached) == (OLD, is_cached)
        assert [(side.text, side.document_ids, side.date) for side in answer.disagreements] == [
            (NEW, (NEW,), "2024"), (OLD, (OLD,), "2019"),
        ]  # fmt: skip
        assert answer.warnings == (
            "the passages disagree: The notice period is 30 days (policy-2024.md), "
            "The notice period is 21 days (policy-2019.md)",
        )
    assert reader.seen == [[OLD, NEW, OTHER], [NEW]], "the contradicting passage alone, once"


def test_passages_that_agree_are_read_once():
    pipeline, reader = pipeline_of()
    answer = pipeline.ask(Question(ASKED, documents_of(OLD, OTHER), order="original", mitigation="none"))
    assert (answer.disagreements, answer.support, reader.seen) == ((), "yes", [[OLD, OTHER]])
