"""An answer that no passage can have given is a refusal, whole and in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix.pipeline.pipeline import Defaults, Pipeline
from rag_posfix.pipeline.word_test import MAX_WORDS, WordTest
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.reader import ScriptedReader

MUSEUM = "The harbour museum shows boats. Admission is eight euros, for children three euros. Odd Nes leads the tours."
CLOSES = "When does the museum close on Sundays?"
COSTS = "How much is the admission for children?"


@pytest.mark.parametrize(
    ("question", "answer", "fails"),
    [
        (CLOSES, "At noon.", True),  # no passage has noon
        (CLOSES, "Sunday", True),  # the question has it
        (CLOSES, "The museum closes on Sundays.", True),
        (COSTS, "Three euros", False),
        (COSTS, "3 euros", False),
        (COSTS, "3", False),
        (COSTS, "7", False),  # a passage may name seven things one by one
        (COSTS, "Seven", False),
        (COSTS, "70", True),
        (COSTS, "1.50", True),
        (COSTS, "70 euros", False),  # it has a word: partly supported
        ("Who leads the tours?", "Odd Nes", False),
        ("Who leads the tours?", "Anna Moe", True),
        ("What does the museum show?", "A boat", False),  # boats
        ("What does it show?", "Museums", False),
        ("What does the museum show?", "Art", True),
        ("Are dogs allowed?", "No.", False),  # nothing to compare
        ("Are dogs allowed?", "Yes, you may bring one.", False),
        ("Are dogs allowed?", "No, leave yours outside.", False),
        ("Are dogs allowed?", "Yes, since 1920.", True),
        ("Are dogs allowed?", "No pet is mentioned.", True),
        ("Who is older, Anna or Ida?", "Ida", False),
        ("Wie teuer ist der Eintritt f\u00fcr die Kinder?", "Drei M\u00e4rker", False),  # the passage is English
        (CLOSES, "", False),
        (CLOSES, "Perhaps seldom, because snow, ice, fog, wind and rain stop ferries", False),  # in many other words
    ],
)
def test_an_answer_without_a_word_of_the_passages_or_with_those_of_the_question_alone_fails(question, answer, fails):
    assert WordTest([MUSEUM], question).fails(answer) is fails


def test_a_beginning_is_open_until_a_complete_word_is_one_of_a_passage():
    test = WordTest([MUSEUM], "Who leads the tours?")
    beginnings = ("", "The", "The tours are led by Od", "The tours are led by Odd", "The tours are led by Odd N")
    assert [test.is_open(beginning) for beginning in beginnings] == [True, True, True, True, False]
    assert not test.is_open(" ".join(f"word{number}" for number in range(MAX_WORDS + 1)))
    assert not WordTest([MUSEUM], "Wer ist der Leiter von dem Museum?").is_open("Der"), (
        "another language is not tested"
    )


def small_reader(*answers, **options):
    script = iter(answers)
    reader = ScriptedReader(written=lambda texts: next(script))
    defaults = Defaults(is_small_reader=True, sampling=Sampling(max_tokens=64), **options)
    return Pipeline(
        reader, Assembler(reader.encoder, 4096), defaults=defaults, cache=TieredAnswerCache([MemoryTier()])
    )


def documents():
    return [Document(page_content=MUSEUM, id="museum", metadata={"source": "museum.md"})]


def test_such_an_answer_is_a_refusal_that_says_why_and_what_shows_it():
    pipeline = small_reader("At noon.")
    answer = pipeline.ask(CLOSES, documents())
    assert (answer.text, answer.support, answer.documents) == (NO_PASSAGE_TEXT, "no", ())
    (warning,) = answer.warnings
    assert "no passage has a word of the answer" in warning
    assert "museum.md" in warning
    assert "--allow-unsupported" in warning
    assert answer.usage.completion_tokens > 0, "the words were written and cost something"
    again = pipeline.ask(CLOSES, documents())
    assert (again.text, again.cached) == (NO_PASSAGE_TEXT, True)
    shown = pipeline.ask(Question(CLOSES, documents(), allow_unsupported=True))
    assert (shown.text, shown.cached, shown.support) == ("At noon.", True, "no")


@pytest.mark.parametrize("answer", ["At noon.", "Odd Nes leads them."])
def test_pieces_are_those_of_the_whole_answer(answer):
    question = "Who leads the boats at noon?"
    whole = small_reader(answer).ask(question, documents())
    chunks = list(small_reader(answer).stream(question, documents()))
    assert "".join(chunk.text for chunk in chunks) == whole.text == chunks[-1].answer.text
    assert len(chunks) > 1 or whole.documents == ()


def test_a_stream_that_is_closed_after_what_was_held_back_stops_the_words():
    written = []

    class Noting(ScriptedReader):
        def stream(self, request):
            try:
                yield from super().stream(request)
            finally:
                written.append("closed")

    pipeline = small_reader()
    pipeline.generator = Noting(written="The tours are led by Odd Nes. He has led them since spring.")
    chunks = pipeline.stream("Who leads the tours?", documents())
    assert next(chunks).text == "T"
    chunks.close()
    assert written == ["closed"]


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Summarise the text.", {}),  # no question for a fact
        (CLOSES, {"allow_unsupported": True}),
    ],
)
def test_other_answers_are_shown_as_they_were_written(question, options):
    assert small_reader("At noon.", **options).ask(question, documents()).text == "At noon."


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_was_cut_is_shown_since_it_may_go_on(streams):
    class Cut(ScriptedReader):
        def stream(self, request):
            *pieces, last = super().stream(request)
            yield from pieces
            yield replace(last, generation=replace(last.generation, finish_reason="length"))

    pipeline = small_reader()
    pipeline.generator = Cut(written="The")
    if streams:
        assert "".join(chunk.text for chunk in pipeline.stream(CLOSES, documents())) == "The"
    else:
        assert pipeline.ask(CLOSES, documents()).text == "The"


def test_large_readers_that_no_judge_was_asked_for_may_answer_in_their_own_words():
    pipeline = small_reader("At noon.")
    pipeline.defaults = Defaults(sampling=Sampling(max_tokens=64))
    assert pipeline.ask(CLOSES, documents()).text == "At noon."
