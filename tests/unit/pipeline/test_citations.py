import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.pipeline.citations import PassageWords, Quote, find_quotes
from tests.support.texts import texts

SEINE = "The Seine flows through Paris. It is 777 km long."
TIBER = "The Tiber flows through Rome. It is 406 km long."


def quoted(answer, passages=(SEINE, TIBER)):
    return [(answer[quote.start : quote.end], quote.passages) for quote in find_quotes(answer, passages)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Seine flows through Paris.", [("The Seine flows through Paris", (0,))]),
        ("Well, the seine, flows THROUGH paris!", [("the seine, flows THROUGH paris", (0,))]),
        ("It flows through the town.", []),
        ("flows through Rome", [("flows through Rome", (1,))]),
        ("It is 777 km", [("It is 777 km", (0,))]),
        ("It is 500 km long", []),
        ("It is long. flows through Paris. It is", [("flows through Paris. It is", (0,))]),
        (
            "The Seine flows through Paris and the Tiber flows through Rome.",
            [("The Seine flows through Paris", (0,)), ("the Tiber flows through Rome", (1,))],
        ),
    ],
)
def test_stretches_of_three_words_and_more_are_found(answer, expected):
    assert quoted(answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris", [("Paris", (0,))]),
        ("Paris.", [("Paris", (0,))]),
        ("777 km", [("777 km", (0,))]),
        ("km long", [("km long", (0, 1))]),
        ("Berlin", []),
        ("Pari", []),
        ("", []),
        ("... !", []),
    ],
)
def test_an_answer_of_one_or_two_words_is_one_stretch(answer, expected):
    assert quoted(answer) == expected


def test_every_passage_that_holds_a_stretch_is_named():
    assert quoted("It is long", (SEINE, "it is long", "x it, is. LONG x")) == [("It is long", (1, 2))]


def test_a_stretch_goes_as_far_as_any_passage_does():
    assert quoted("one two three four", ("one two three", "one two three four")) == [("one two three four", (1,))]


def test_words_match_whole():
    assert quoted("is it in", ("this it in",)) == []


def test_capitals_that_become_two_characters_match():
    assert quoted("İstanbul lies here", ("Old İSTANBUL lies here.",)) == [("İstanbul lies here", (0,))]


def test_without_passages_nothing_is_quoted():
    assert find_quotes("one two three", []) == []
    assert find_quotes("one two three", ["", " ."]) == []


def test_positions_are_those_of_the_answer():
    assert find_quotes("  Paris!", [SEINE]) == [Quote(2, 7, (0,))]


answers = st.lists(st.sampled_from(["a", "B", "c.", "d", "é", " ", "\n"]), max_size=14).map(" ".join)


def words(text):
    return [word.lower() for word in re.findall(r"\w+", text)]


@given(answers, st.lists(answers, max_size=3))
def test_every_quote_stands_in_the_passages_it_names_and_nowhere_else(answer, passages):
    quotes = find_quotes(answer, passages)
    end = 0
    for quote in quotes:
        assert end <= quote.start < quote.end <= len(answer)
        end = quote.end
        said = words(answer[quote.start : quote.end])
        assert len(said) >= min(3, len(words(answer)))
        for index, passage in enumerate(passages):
            there = words(passage)
            stands = any(there[i : i + len(said)] == said for i in range(len(there)))
            assert stands is (index in quote.passages)


@given(texts().filter(lambda text: re.search(r"\w", text)))
def test_an_answer_that_is_a_passage_is_quoted_from_its_first_word_to_its_last(answer):
    found = list(re.finditer(r"\w+", answer))
    assert find_quotes(answer, [answer]) == [Quote(found[0].start(), found[-1].end(), (0,))]


@given(texts(), texts())
def test_every_quote_is_found_in_its_passages_word_for_word(answer, passage):
    for quote in find_quotes(answer, [passage]):
        text = answer[quote.start : quote.end]
        span = PassageWords(passage).find(text)
        assert span is not None
        found = passage[slice(*span)]
        assert [word.lower() for word in re.findall(r"\w+", found)] == [
            word.lower() for word in re.findall(r"\w+", text)
        ]


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("flows through", "flows through"),
        ("rome IT is", "Rome. It is"),
        ("The", "The"),
        ("km long", "km long"),
        ("through R", None),
        ("Seine", None),
        ("...", None),
    ],
)
def test_a_quote_has_its_characters_in_the_passage(quote: str, expected: str | None):
    span = PassageWords(TIBER).find(quote)
    assert (None if span is None else TIBER[slice(*span)]) == expected
