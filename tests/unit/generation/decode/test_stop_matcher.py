from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.generation.decode.answer_writer import StopMatcher, TextStream


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.text("abc", max_size=4), max_size=12))
def test_it_finds_what_a_search_of_the_whole_text_finds(stops: list[str], pieces: list[str]):
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        text += piece
        found = matcher.push(piece)
        expected = min((at for at in map(text.find, stops) if at >= 0), default=None)
        assert found == expected
        if found is not None:
            return
        ends = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert matcher.undecided == max(ends, default=0)


@pytest.mark.parametrize(
    ("stop", "text", "start"),
    [("aab", "aaab", 1), ("abac", "ababac", 2), ("aabaaa", "aabaabaaa", 3), ("aaa", "aabaa", None), ("ab", "ab", 0)],
)
def test_a_failed_match_goes_on_from_its_longest_border(stop, text, start):
    assert StopMatcher([stop]).push(text) == start
    letters = StopMatcher([stop])
    found = [letters.push(letter) for letter in text]
    assert found == [None] * (len(text) - 1) + [start]


def test_long_stop_strings_cost_no_more_than_the_text():
    """Each token was compared with every beginning of every stop string."""
    stops = ["b" + "a" * size for size in range(4000, 4004)]
    stream = TextStream(lambda ids: "a" * len(ids), stops)
    started = time.process_time()
    for _ in range(5000):
        stream.push(0)
    assert stream.text == "a" * 5000
    assert time.process_time() - started < 2
