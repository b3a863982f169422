import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError
from rag_posfix.retrieval.ingest.passages import CharSpan, PassageSize, split_passages

prose = st.lists(
    st.sampled_from(
        ["word", "ein", "Ünïcödé", "数据。", "end.", "so?", "\n", "\n\n", "\r\n\r\n", " ", "\t", "\u2028", "x" * 30]
    )
).map(" ".join)
sizes = st.builds(PassageSize, words=st.integers(1, 12), characters=st.integers(1, 60))


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(prose, st.text()), size=sizes)
def test_only_whitespace_lies_outside_of_the_passages_and_each_keeps_its_bounds(text, size):
    end = 0
    for span in split_passages(text, size):
        assert span.start >= end
        assert text[end : span.start].strip() == ""
        passage = text[span.start : span.end]
        assert passage == passage.strip() != ""
        assert len(passage) <= size.characters
        assert len(passage.split()) <= size.words
        end = span.end
    assert text[end:].strip() == ""


def test_paragraphs_are_joined_while_they_fit_and_never_broken_when_they_fit():
    text = "one two\n\nthree four\n\nfive six seven"
    passages = [text[span.start : span.end] for span in split_passages(text, PassageSize(words=4))]
    assert passages == ["one two\n\nthree four", "five six seven"]


def test_a_long_paragraph_is_broken_at_sentences():
    text = "The first one ends. The second one ends! Is there a third?"
    passages = [text[span.start : span.end] for span in split_passages(text, PassageSize(words=4))]
    assert passages == ["The first one ends.", "The second one ends!", "Is there a third?"]


def test_a_word_longer_than_a_passage_is_cut():
    assert split_passages("abcdefg", PassageSize(characters=3)) == [CharSpan(0, 3), CharSpan(3, 6), CharSpan(6, 7)]


@pytest.mark.parametrize("text", ["", " \n\t\n "])
def test_text_without_visible_characters_has_no_passages(text):
    assert split_passages(text) == []


@pytest.mark.parametrize("text", ["\n " * 200_000, "." * 400_000, '."' * 200_000, "word " * 80_000])
def test_time_grows_with_the_length_and_not_faster(text):
    started = time.process_time()
    split_passages(text + "end")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("field", ["words", "characters"])
def test_a_size_below_one_is_refused(field):
    with pytest.raises(ConfigError, match=rf"{field}=0 must be >= 1"):
        PassageSize(**{field: 0})
