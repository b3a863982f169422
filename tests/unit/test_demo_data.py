from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from difflib import SequenceMatcher

import pytest
from langchain_core.documents import Document

from rag_posfix.demo_data import DemoQuestion, load_passages, load_questions
from rag_posfix.text import clean_text

PASSAGES = {passage.id: passage for passage in load_passages()}
QUESTIONS = load_questions()

each_passage = pytest.mark.parametrize("passage", PASSAGES.values(), ids=lambda passage: passage.id)
each_question = pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)


def holds(passage: Document, question: DemoQuestion) -> list[str]:
    """The accepted answers that stand in the passage or in its title."""
    text = f"{passage.metadata['title']}\n{passage.page_content}".lower()
    return [answer for answer in question.answers if answer.lower() in text]


def similarity(left: Document, right: Document) -> float:
    """The share of words that two passages have in common, in the same order."""
    words = [passage.page_content.lower().split() for passage in (left, right)]
    return SequenceMatcher(None, *words, autojunk=False).ratio()


def test_there_is_enough_of_everything():
    assert len(load_passages()) >= 40
    assert len(QUESTIONS) >= 20
    assert len(load_passages()) == len(PASSAGES)
    assert len({passage.page_content for passage in PASSAGES.values()}) == len(PASSAGES)
    assert len({passage.metadata["title"] for passage in PASSAGES.values()}) == len(PASSAGES)
    assert len({question.id for question in QUESTIONS}) == len(QUESTIONS)
    assert len({question.question for question in QUESTIONS}) == len(QUESTIONS)
    assert len({question.gold for question in QUESTIONS}) == len(QUESTIONS)


@each_passage
def test_passage_is_of_a_passage_s_length_and_clean(passage):
    assert 60 <= len(passage.page_content.split()) <= 110
    assert passage.page_content.endswith(".")
    assert set(passage.metadata) == {"title"}
    for text in (passage.id, passage.metadata["title"], passage.page_content):
        assert text == clean_text(text).strip()
        assert text.isascii()
        assert text.isprintable()  # no line breaks and no control characters
        assert re.search(r"<\||\|>|</?s>|\[/?INST\]|[{}]|  ", text) is None  # no control tokens, no template slots


@each_question
def test_question_is_clean_and_its_answer_short(question):
    assert question.question.endswith("?")
    assert question.answers[0] == question.answer
    assert len(set(question.answers)) == len(question.answers)
    for text in (question.id, question.question, *question.answers):
        assert text == clean_text(text).strip()
        assert text.isascii()
        assert text.isprintable()
        assert "<|" not in text
    for answer in question.answers:
        assert 1 <= len(answer.split()) <= 4
        assert answer.lower() not in question.question.lower()


@each_question
def test_only_the_gold_passage_holds_the_answer(question):
    assert question.answer in PASSAGES[question.gold].page_content
    assert {name for name in question.distractors if holds(PASSAGES[name], question)} == set()


@each_question
def test_distractors_are_other_passages_nearest_first(question):
    assert len(question.distractors) >= 9
    assert len(set(question.distractors)) == len(question.distractors)
    assert question.gold not in question.distractors
    assert set(question.distractors) <= set(PASSAGES)
    gold = PASSAGES[question.gold]
    nearest = [similarity(gold, PASSAGES[name]) for name in question.distractors]
    assert min(nearest[:2]) > max(nearest[2:])
    assert min(nearest[:2]) > 0.5


def test_look_alikes_make_the_corpus_hard():
    pairs = [
        (left.id, right.id)
        for left, right in itertools.combinations(PASSAGES.values(), 2)
        if similarity(left, right) > 0.6
    ]
    assert len(pairs) >= 8
    assert len(set(itertools.chain.from_iterable(pairs))) >= 16


def test_questions_are_frozen():
    with pytest.raises(FrozenInstanceError):
        QUESTIONS[0].answer = "nobody"


def test_each_call_returns_documents_of_its_own():
    load_passages()[0].metadata["title"] = "changed"
    assert load_passages()[0].metadata["title"] != "changed"


def test_importing_is_cheap():
    code = "import sys, rag_posfix.demo_data; print(*({'torch', 'transformers', 'langchain_core'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
