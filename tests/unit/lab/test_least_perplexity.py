"""The least perplexity of the generated text, worked out from its probabilities, beside what was trained."""

from __future__ import annotations

import random
from itertools import islice
from math import exp, log

import pytest

from benchmarks.keep_record import RESULTS
from rag_posfix.evaluation.record import read_head
from rag_posfix.lab.tasks.language import KEPT, NAMES, sentences
from tests.support.pages import DOCS

WORDS = 3 + 1 + 1 + 0.5 * 3 + 0.3 + 1 + 0.25
"""Of a sentence in the mean: person, verb, article; adjectives; thing; place; last word; both ends."""


def entropy(*shares: float) -> float:
    return -sum(share * log(share) for share in shares)


def perplexity(person: float) -> float:
    """Return the perplexity of a reader for whom the person of a sentence has this entropy, in nats."""
    adjectives = log(3) + 2 / 3 * log(6) + 1 / 3 * log(5)  # how many, the first, the second
    place = log(2) + (1 - 0.5**4) * log(6) / 4  # whether there is one; which, once in a paragraph
    last_word = entropy(0.3, 0.7) + 0.3 * log(2)
    return exp((person + log(6) + log(2) + adjectives + log(8) + place + last_word) / WORDS)


def known(people: int) -> float:
    """Return the entropy of the person of a sentence for a reader who knows that of the paragraph before."""
    return entropy(KEPT + (1 - KEPT) / people, *[(1 - KEPT) / people] * (people - 1))


def test_the_mean_length_of_a_sentence_is_that_of_the_text():
    lengths = [len(words) for words in islice(sentences(random.Random(0)), 20000)]
    assert sum(lengths) / len(lengths) == pytest.approx(WORDS, rel=0.01)


def test_the_page_has_the_perplexity_with_the_person_known_and_not_known():
    page = (DOCS / "laboratory.md").read_text("utf-8").replace("\n", " ")
    assert len(NAMES) == 12
    assert f"a perplexity of {perplexity(known(12)):.2f}" in page
    assert f"the person of a sentence {perplexity(log(12)):.2f}" in page


@pytest.mark.parametrize(("record", "people"), [("lab-language", 12), ("lab-language-two-people", 2)])
def test_no_trained_decoder_is_below_it_and_all_but_one_are_close(record, people):
    encodings = read_head(RESULTS / f"{record}.json")["summary"]["encodings"]
    found = sorted(one["splits"]["in"]["mean"] for one in encodings.values())
    assert found[0] > 0.99 * perplexity(known(people))  # the examples of an evaluation vary
    assert found[-2] < 1.01 * perplexity(known(people))
