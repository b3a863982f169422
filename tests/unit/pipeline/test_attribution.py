import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.contracts.request import TokenSource
from rag_posfix.pipeline.citations import SentenceAttribution, attribute_sentences, dominant
from tests.support.texts import texts


def tokens(*parts):
    """Return the answer of these (text, shares) and their sources."""
    answer, sources = "", []
    for text, shares in parts:
        answer += text
        sources.append(TokenSource(len(answer), shares))
    return answer, sources


def test_a_sentence_has_the_mean_shares_of_its_tokens():
    answer, sources = tokens(
        ("Rome", (1.0, 0.0)), (" is", (0.5, 0.5)), (" old", (0.6, 0.4)), (".", (0.3, 0.7)),
        (" Paris", (0.0, 1.0)), (" too.", (0.2, 0.6)),
    )  # fmt: skip
    first, second = attribute_sentences(answer, sources)
    assert (first.start, first.end, answer[first.start : first.end]) == (0, 12, "Rome is old.")
    assert first.shares == pytest.approx((0.6, 0.4))
    assert (answer[second.start : second.end], second.shares) == ("Paris too.", pytest.approx((0.1, 0.8)))


def test_tokens_without_text_count_for_none():
    answer, sources = tokens(("\n", (0.0, 1.0)), ("Rome", (1.0, 0.0)), (" ", (0.0, 1.0)), ("", (0.0, 1.0)))
    assert attribute_sentences(answer, sources) == [SentenceAttribution(1, 5, (1.0, 0.0))]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("One two. Three 3.5 four! Five\nSix?", ["One two.", "Three 3.5 four!", "Five", "Six?"]),
        ("  A.B. c.  ", ["A.B. c."]),  # a sentence begins with no small letter
        ("\u6771\u4eac\u3002\u5927\u962a\u3002", ["\u6771\u4eac\u3002", "\u5927\u962a\u3002"]),
        ("1871", ["1871"]),
        (" \n ", []),
        ("", []),
    ],
)
def test_where_sentences_end(answer, expected):
    letters = [TokenSource(i + 1, (1.0,)) for i in range(len(answer))]
    assert [answer[claim.start : claim.end] for claim in attribute_sentences(answer, letters)] == expected


def test_an_answer_that_was_not_traced_has_no_claims():
    assert attribute_sentences("Rome is old.", []) == []


@given(texts(8), st.data())
def test_claims_are_apart_and_their_shares_are_means(answer, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    shares = st.tuples(st.floats(0, 0.5), st.floats(0, 0.5))
    sources = [TokenSource(end, data.draw(shares)) for end in [*cuts, len(answer)]]
    claims = attribute_sentences(answer, sources)
    assert all(0 <= claim.start < claim.end <= len(answer) for claim in claims)
    assert all(a.end <= b.start for a, b in itertools.pairwise(claims))
    assert all(0 <= share <= 0.5 for claim in claims for share in claim.shares)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.1, 0.6, 0.3), 1),
        ((0.1, 0.6, 0.31), None),  # less than twice the next
        ((0.34, 0.17, 0.17), 0),
        ((0.32, 0.0, 0.0), None),  # less than a third
        ((1 / 3, 0.0, 0.0), 0),
        ((math.nextafter(1 / 3, 0), 0.0, 0.0), None),
        ((0.5, 0.25, 0.25), 0),
        ((0.5, math.nextafter(0.25, 1), 0.24), None),
        ((1.0,), 0),
        ((0.2,), None),
        ((0.5, 0.5), None),
        ((), None),
    ],
)
def test_a_passage_dominates_with_a_third_and_twice_any_other(shares, expected):
    assert dominant(shares) == expected
