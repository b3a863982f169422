"""Budgets per passage through the assembler. One token is one byte; a passage ends in a blank line, two tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.assembly.documents import content_key
from rag_posfix.assembly.orders import permute
from rag_posfix.assembly.tokenization import PassageBudget
from rag_posfix.errors import PromptTooLongError
from tests.support.toy_encoder import ToyEncoder

SENTENCES = "One two three. Four five six. Seven eight nine."  # ends after 14, 29 and 47 characters


def assembler(**budget):
    return Assembler(ToyEncoder(), 4096, budget=PassageBudget(**budget))


def scored(*texts):
    return [
        Document(page_content=text, id=str(i), metadata={"relevance_score": 1 - i / 10})
        for i, text in enumerate(texts)
    ]


def words(made):
    decode = ToyEncoder().decode
    return [decode(made.layout.tokens(span)) for span in made.layout.texts]


def test_late_ranks_have_less_and_end_with_a_sentence():
    documents = scored(*(f"{i} {SENTENCES}" for i in "abc"))
    # 40 (1 + 0.5), 40, 40 (1 - 0.5), each less the separator of two: 58, 38 and 18 characters.
    made = assembler(tokens=40, shrink=0.5, overflow="truncate").assemble("Who?", documents)
    assert words(made) == [f"a {SENTENCES}", "b One two three. Four five six.", "c One two three."]
    assert (made.truncated, made.dropped) == (("1", "2"), ())


def test_what_a_passage_may_have_goes_by_rank_and_not_by_place():
    documents = scored(*(f"{i} {SENTENCES}" for i in "abc"))
    made = {
        order: assembler(tokens=40, shrink=0.5, overflow="truncate").assemble("Who?", documents, order=order)
        for order in ("relevance", "reverse", "ends_first", "random")
    }
    assert len({tuple(sorted(words(one))) for one in made.values()}) == 1
    assert made["reverse"].ids == ("2", "1", "0")


def test_dropping_leaves_out_what_is_longer_but_keeps_the_best_shortened():
    documents = scored("a" * 50, "b" * 50, "c" * 30)
    made = assembler(tokens=40).assemble("Who?", documents)
    assert words(made) == ["a" * 38, "c" * 30]
    assert (made.truncated, made.dropped) == (("0",), (("1", "budget"),))


def test_truncating_fills_the_whole_budget():
    documents = scored(SENTENCES, SENTENCES.upper(), "c" * 30)
    made = assembler(overflow="truncate").assemble("Who?", documents, budget_tokens=80)
    # 49 of 80, then 31: 29 characters and the separator.
    assert words(made) == [SENTENCES, "ONE TWO THREE. FOUR FIVE SIX."]
    assert (made.truncated, made.dropped) == (("1",), (("2", "budget"),))


def test_what_is_too_short_to_be_cut_is_left_out():
    documents = scored("a" * 30, "b" * 30)
    made = assembler(overflow="truncate").assemble("Who?", documents, budget_tokens=32 + 5)
    assert (words(made), made.dropped) == (["a" * 30], (("1", "budget"),))
    made = assembler(overflow="truncate").assemble("Who?", documents, budget_tokens=32 + 6)
    assert (words(made), made.dropped, made.truncated) == (["a" * 30, "b" * 4], (), ("1",))


def test_an_error_says_which_document_and_what_to_do():
    with pytest.raises(PromptTooLongError, match=r"document '1' takes 52 tokens and may take 40; raise the budget"):
        assembler(tokens=40, overflow="error").assemble("Who?", scored("a" * 30, "b" * 50))
    assert assembler(tokens=40, overflow="error").assemble("Who?", scored("a" * 30, "b" * 38)).dropped == ()


def test_a_random_order_is_that_of_the_seed():
    documents = scored(*"abcdef")
    for seed in (0, 7):
        made = Assembler(ToyEncoder(), 4096).assemble("Who?", documents, order="random", seed=seed)
        assert made.ids == tuple(map(str, permute("random", [None] * 6, seed)))
    assert permute("random", [None] * 6, 0) != permute("random", [None] * 6, 7)


def test_a_question_that_is_far_too_long_is_not_tokenised_whole():
    with pytest.raises(PromptTooLongError, match="question, history and template take"):
        Assembler(ToyEncoder(), 16).assemble("w" * 2 * (16 + 32))
    with pytest.raises(PromptTooLongError, match="question and history have 97 characters"):
        Assembler(ToyEncoder(), 16).assemble("w" * (2 * (16 + 32) + 1))


@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=12),
    st.integers(12, 80),
    st.floats(0, 1),
    st.sampled_from(["drop", "truncate"]),
    st.integers(20, 400),
)
def test_every_passage_keeps_its_limit_and_all_keep_the_budget(lengths, tokens, shrink, overflow, budget):
    documents = scored(*(f"{chr(65 + i)}" * length for i, length in enumerate(lengths)))
    rules = PassageBudget(tokens, shrink, overflow)
    limit = rules.limits(len(documents), budget)
    made = Assembler(ToyEncoder(), 4096, budget=rules).assemble("Who?", documents, budget_tokens=budget)
    for identity, span in zip(made.ids, made.layout.passages, strict=True):
        assert len(span) <= limit(int(identity))
    assert sum(map(len, made.layout.passages)) <= budget
    assert set(made.truncated) <= set(made.ids)
    assert sorted([*made.ids, *(dropped.id for dropped in made.dropped)]) == sorted(
        str(i) for i in range(len(lengths))
    )


class Counting(ToyEncoder):
    """Counts the characters that it encodes."""

    characters = 0

    def encode_text(self, text):
        self.characters += len(text)
        return super().encode_text(text)


def test_a_text_that_cannot_fit_is_not_tokenised_to_its_end():
    encoder = Counting()
    made = Assembler(encoder, 4096).assemble("Who?", [Document(page_content="word " * 1_000_000, id="long")])
    assert made.truncated == ("long",)
    assert made.layout.keys == (content_key(Document(page_content="word " * 1_000_000)),)
    assert encoder.characters < 300_000
    with pytest.raises(PromptTooLongError, match="5000000 characters"):
        Assembler(encoder, 4096).assemble("Who? " * 1_000_000)
    assert encoder.characters < 300_000
