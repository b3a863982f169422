"""Faults of an answer's form."""

from __future__ import annotations

import pytest

from rag_posfix.contracts.answer import find_form_fault, repeats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Pi Day Die Day Pi Day Die Day", True),  # four words, twice in succession
        ("no, no: it was Rome", False),  # a word twice is ordinary English
        ("new york new york", True),
        ("a b c a b d", False),
    ],
)
def test_a_repetition_is_a_run_of_words_twice_in_succession(text, expected):
    assert repeats(text) is expected


def test_runs_of_up_to_a_hundred_words_are_compared_with_what_follows_them():
    run = [f"w{number}" for number in range(101)]
    assert repeats(" ".join(["so", *run[:100], *run[:100]]))
    assert not repeats(" ".join([*run[:100], *run[:99]]))
    assert not repeats(" ".join([*run, *run]))  # longer ones are not looked for
    assert not repeats(" ".join(f"w{number}" for number in range(5000)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("42", None),
        ("\u516d\u4e2a\u6708\u3002", None),
        ("", "empty"),
        ("...", "empty"),
        ("1/2", "fragment"),
        ("1.", "fragment"),
        ("2) Rome", None),
        ("Portland, OR", None),
        ("It was built in the", "fragment"),
        (" ".join(f"w{n}" for n in range(60)), None),
        (" ".join(f"w{n}" for n in range(61)), "endless"),
        (" ".join(f"w{n}" for n in range(40)) + ". " + " ".join(f"v{n}" for n in range(40)) + ".", None),
    ],
)
def test_the_fault_of_an_answer_is_named(text, fault):
    assert find_form_fault(text) == fault


def test_an_answer_that_max_tokens_cut_may_end_anywhere():
    assert find_form_fault("It was built in the", is_cut=True) is None
    assert find_form_fault("no no no", is_cut=True) == "repetition"


def test_a_later_sentence_without_an_end_is_endless():
    words = " ".join(f"word{number}" for number in range(61))
    assert find_form_fault(f"In 1901. {words}") == "endless"
    assert find_form_fault(f"In 1901. {words.replace('word30 ', 'word30. ')}") is None
