from __future__ import annotations

import itertools
import re
import subprocess
import sys
from difflib import SequenceMatcher

import pytest
from langchain_core.documents import Document

from rag_posfix.demo_data import DemoQuestion, load_passages, load_questions
from rag_posfix.text import clean_text

PASSAGES = {passage.id: passage for passage in load_passages()}
QUESTIONS = load_questions()


def holds(passage: Document, question: DemoQuestion) -> list[str]:
    """The accepted answers that stand in the passage or in its title."""
    text = f"{passage.metadata['title']}\n{passage.page_content}".lower()
    return [answer for answer in question.answers if answer.lower() in text]


def similarity(left: Document, right: Document) -> float:
    """The share of words that two passages have in common, in the same order."""
    words = [passage.page_content.lower().split() for passage in (left, right)]
    return SequenceMatcher(None, *words, autojunk=False).ratio()


def test_there_is_enough_of_everything():
    assert len(load_passages()) == len(PASSAGES) >= 40
    for each in (lambda one: one.page_content, lambda one: one.metadata["title"]):
        assert len(set(map(each, PASSAGES.values()))) == len(PASSAGES)
    assert len(QUESTIONS) >= 20
    for each in (lambda one: one.id, lambda one: one.question, lambda one: one.gold):
        assert len(set(map(each, QUESTIONS))) == len(QUESTIONS)


def test_passages_and_questions_are_clean_and_short():
    for text in itertools.chain(
        *((one.id, one.metadata["title"], one.page_content) for one in PASSAGES.values()),
        *((one.id, one.question, *one.answers) for one in QUESTIONS),
    ):
        assert text == clean_text(text).strip()
        assert text.isascii()
        assert text.isprintable()  # no line breaks and no control characters
        assert re.search(r"<\||\|>|</?s>|\[/?INST\]|[{}]|  ", text) is None  # no control tokens, no template slots
    for passage in PASSAGES.values():
        assert 60 <= len(passage.page_content.split()) <= 110
    for question in QUESTIONS:
        assert question.answers[0] == question.answer
        for answer in question.answers:
            assert 1 <= len(answer.split()) <= 4
            assert answer.lower() not in question.question.lower()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.id)
def test_only_the_gold_passage_holds_the_answer_and_the_nearest_passages_come_first(question):
    gold = PASSAGES[question.gold]
    assert question.answer in gold.page_content
    assert {name for name in question.distractors if holds(PASSAGES[name], question)} == set()
    assert len({question.gold, *question.distractors}) == 1 + len(question.distractors) >= 10
    nearest = [similarity(gold, PASSAGES[name]) for name in question.distractors]
    assert min(nearest[:2]) > max(0.5, *nearest[2:])


def test_look_alikes_make_the_corpus_hard():
    pairs = [
        (left.id, right.id)
        for left, right in itertools.combinations(PASSAGES.values(), 2)
        if similarity(left, right) > 0.6
    ]
    assert len(pairs) >= 8
    assert len(set(itertools.chain.from_iterable(pairs))) >= 16


def test_each_call_returns_documents_of_its_own():
    load_passages()[0].metadata["title"] = "changed"
    assert load_passages()[0].metadata["title"] != "changed"


def test_importing_is_cheap():
    code = "import sys, rag_posfix.demo_data; print(*({'torch', 'transformers', 'langchain_core'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
