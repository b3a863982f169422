"""Prompts ask for the last sentence, and a planted answer is told as what it is the count of."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest

from rag_posfix.errors import UnsupportedModelError
from rag_posfix.lab.probing.word_counting import SENTENCES, WordCounting, counting_prompts
from tests.unit.lab.probing.probed import small_decoder, tiny_model


def test_counts_are_those_of_the_sentences():
    prompts = counting_prompts()
    assert len(prompts) > 20
    for prompt in prompts:
        first, last = next(pair for pair in pairwise(SENTENCES) if " ".join(pair) in prompt.text)
        found = [len(re.findall(rf"\b{prompt.word}\b", text, re.IGNORECASE)) for text in (first, last)]
        assert found == [prompt.first, prompt.last]
        assert prompt.first > 0, "a count of both sentences is wrong"
    # Twice in the sentence of the shelves, and twice in the one after it.
    assert [(one.first, one.last) for one in prompts if one.word == "jar"] == [(2, 2)]
    lasts = Counter(prompt.last for prompt in prompts)
    assert lasts[0] == max(count for last, count in lasts.items() if last), "no is not the answer to most"


def test_shares_are_of_all_answers_and_the_record_has_every_prompt(tmp_path):
    record = WordCounting(limit=6).run(tiny_model(1000), out=tmp_path)
    assert len(record.rows) == record.summary["prompts"] == 6
    shares = record.summary["shares"].values()
    assert sum(share["value"] for share in shares) == pytest.approx(1)
    assert all(share["n"] == 6 and share["ci95"][0] <= share["value"] <= share["ci95"][1] for share in shares)
    for row in record.rows:
        kinds = {row["last"]: "right", row["first"] + row["last"]: "count of both sentences"}
        assert row["kind"] == {row["first"]: "count of the first sentence", **kinds}.get(
            row["answer"], "another number"
        )
    assert {"record", "svg", "png"} == set(record.files)


def test_a_small_decoder_reads_no_text():
    with pytest.raises(UnsupportedModelError, match="word-counting reads text"):
        WordCounting().run(small_decoder())
