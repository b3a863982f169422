import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError
from rag_posfix.text import checked_question, clean_json, clean_text, content_hash, parse_json, whole_words

# Any code point, and the troublesome ones often.
characters = st.one_of(st.characters(exclude_categories=()), st.sampled_from("\ud800\udbff\udc00\udfff\x00\ufeffa😀"))
texts = st.lists(characters, max_size=12).map("".join)


def cleaned_plainly(text: str) -> str:
    """The same as clean_text, pair by pair."""

    def one(match: re.Match[str]) -> str:
        if len(match[0]) == 1:
            return "\ufffd"
        high, low = map(ord, match[0])
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))

    return re.sub("[\ud800-\udbff][\udc00-\udfff]|[\ud800-\udfff\x00]", one, text)


@given(texts)
def test_cleaning_replaces_each_lone_surrogate_and_each_nul(text):
    assert clean_text(text) == cleaned_plainly(text)


@given(texts)
def test_clean_text_can_be_encoded_and_is_left_alone_by_a_second_cleaning(text):
    once = clean_text(text)
    assert once.encode().decode() == once
    assert "\x00" not in once
    assert clean_text(once) == once


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00")))
def test_ordinary_text_is_returned_unchanged(text):
    assert clean_text(text) is text


def test_a_pair_that_arrived_as_two_code_points_becomes_one_character():
    assert clean_text("a\ud83d\ude00b") == "a😀b"


def test_lone_surrogates_take_no_neighbour_with_them():
    assert clean_text("x\ud83dy\ude00z") == "x\ufffdy\ufffdz"
    assert clean_text("\ud83d") == "\ufffd"
    assert clean_text("\ude00\ud83d") == "\ufffd\ufffd"


def test_a_byte_order_mark_in_the_text_stays():
    assert clean_text("\ufeffa\x00") == "\ufeffa\ufffd"


def test_a_hash_is_128_bits_in_hexadecimal_and_the_same_in_every_process():
    assert content_hash("passage") == content_hash("passage")
    assert re.fullmatch("[0-9a-f]{32}", content_hash("passage"))
    # Written down: a changed hash would orphan every stored key without a change of schema version.
    assert content_hash("title", "text") == "7b668f528cb75c5c60e4274ab17ff46a"


@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4))
def test_hashes_are_equal_exactly_when_the_cleaned_parts_are(left, right):
    same = list(map(clean_text, left)) == list(map(clean_text, right))
    assert (content_hash(*left) == content_hash(*right)) is same


def test_the_boundaries_between_parts_count():
    hashes = [content_hash("ab", "c"), content_hash("a", "bc"), content_hash("abc"), content_hash("abc", "")]
    assert len(set(hashes)) == 4


def test_damaged_and_repaired_text_hash_alike():
    assert content_hash("a\ud83d") == content_hash("a\ufffd")
    assert content_hash("\ud83d\ude00") == content_hash("😀")


def test_json_is_cleaned_at_any_depth_in_keys_and_values_and_copied():
    given = {"a\x00": ["\ud800", {"b": "c"}], "n": 1.5}
    assert clean_json(given) == {"a\ufffd": ["\ufffd", {"b": "c"}], "n": 1.5}
    assert given == {"a\x00": ["\ud800", {"b": "c"}], "n": 1.5}


def test_a_line_of_json_is_parsed_with_clean_strings():
    assert parse_json('{"a\\u0000": ["\\ud83d\\ude00", "\\ud800", null, 2]}') == {"a\ufffd": ["😀", "\ufffd", None, 2]}


@pytest.mark.parametrize("line", ["{", "NaN", "[-Infinity]", "[" * 100_000])
def test_what_is_not_json_is_a_value_error(line):
    with pytest.raises(ValueError, match=r"Expecting|is not JSON|nested too deeply"):
        parse_json(line)


@pytest.mark.parametrize("question", ["", " \n\t", None, 7])
def test_a_question_without_a_visible_character_is_refused(question):
    with pytest.raises(ConfigError, match="the question is empty"):
        checked_question(question)


def test_a_question_is_cleaned():
    assert checked_question(" who\ud800? ") == " who\ufffd? "


@pytest.mark.parametrize(
    ("phrase", "text", "stands"),
    [
        ("Rom", "Rome", False),
        ("Rom", "in Rom.", True),
        ("दिल्ल", "दिल्ली", False),  # a vowel sign goes on
        ("दिल्ली", "नई दिल्ली।", True),
        ("京", "東京都", True),
        ("3.5", "約3.5倍", True),
    ],
)
def test_a_phrase_stands_where_no_word_goes_on(phrase: str, text: str, stands: bool):
    assert bool(re.search(whole_words(phrase), text)) is stands
