"""The end of an answer's first sentence, token by token."""

from __future__ import annotations

import pytest

from rag_posfix.generation.decode.answer_writer import FirstSentence


@pytest.mark.parametrize(
    ("tokens", "over"),
    [
        (["Rome"], False),
        (["Rome", "."], False),  # "Rome.org" is one word
        (["Rome", ".", " It"], True),
        (["It cost 3", ".", "5", " m"], False),
        (["\n", "\n", "Rome"], False),
        (["Rome", "\n"], True),
        (["\u516d\u4e2a\u6708", "\u3002"], True),
        (["Rome", ".", " It", *[" is"] * 20], True),
    ],
)
def test_the_first_sentence_ends_with_a_stop_and_a_space_or_with_a_line(tokens, over):
    state = FirstSentence(lambda ids: "".join(tokens[i] for i in ids))
    for token in range(len(tokens)):
        state = state.add(token)
    assert state.has_ended == over


def test_without_text_no_sentence_ends():
    assert not FirstSentence().add(1).add(2).has_ended
