"""A follow-up with the name that its pronoun stands for."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from rag_posfix.pipeline.pipeline import Defaults, Question
from rag_posfix.pipeline.pronouns import with_names
from tests.support.pipelines import pipeline


def asked(question, *messages):
    return with_names(question, [{"role": "user", "content": message} for message in messages])


@pytest.mark.parametrize(
    ("message", "question", "expected"),
    [
        ("Tell me about the ferry Ostrilla.", "When did she sink?", "When did the ferry Ostrilla sink?"),
        ("What colour is the tug Bjarke?", "Who is her captain?", "Who is the tug Bjarke's captain?"),
        ("Who was Johan Myrseth?", "Where was he born?", "Where was Johan Myrseth born?"),
        ("Who was Edvard Lie?", "Which court cleared him?", "Which court cleared Edvard Lie?"),
        ("When was the Lighthouse of Torvane lit?", "Who designed it?", "Who designed the Lighthouse of Torvane?"),
    ],
)
def test_a_pronoun_is_replaced_by_the_name_of_the_last_message(message, question, expected):
    assert asked(question, message) == expected


def test_the_newest_message_with_a_name_counts():
    messages = ("Who was Johan Myrseth?", "Tell me about the ferry Ostrilla.", "When was she built?")
    assert asked("When did she sink?", *messages) == "When did the ferry Ostrilla sink?"


@pytest.mark.parametrize(
    "question",
    ["When did the Haldis sink?", "Did she know Johan?", "How long does it take?", "And the other ferry?",
     "Wann sank sie?"],
)  # fmt: skip
def test_a_question_that_needs_no_name_stays(question):
    assert asked(question, "Tell me about the ferry Ostrilla.") == question


@pytest.mark.parametrize(
    "message",
    [
        "What if I'm ill for a week?",
        "Is the canteen open on Monday?",
        "Is the pool open in July?",
        "Is there a German one?",
    ],
)
def test_a_day_a_month_a_language_and_a_short_form_are_no_names(message):
    assert asked("How much does it cost?", message) == "How much does it cost?"


def test_without_a_name_or_a_history_the_question_stays():
    assert asked("When did she sink?", "Tell me about the old ferry.") == "When did she sink?"
    assert asked("When did she sink?") == "When did she sink?"


@pytest.mark.parametrize(
    ("is_on", "expected"), [(True, "When did the ferry Ostrilla sink?"), (False, "When did she sink?")]
)
def test_the_prompt_has_the_name_where_the_defaults_say_so(is_on, expected):
    question = Question(
        "When did she sink?", [Document("She sank in 1952.", id="a")],
        history=[{"role": "user", "content": "Tell me about the ferry Ostrilla."}],
    )  # fmt: skip
    asked_of = pipeline(defaults=Defaults(is_small_reader=is_on))
    assert f"Question: {expected}" in asked_of.preview(question).text
    assert asked_of.ask(question).query == "Tell me about the ferry Ostrilla.\nWhen did she sink?"
