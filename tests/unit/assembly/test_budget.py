import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rag_posfix.assembly.tokenization import (
    FEWEST_TOKENS,
    PassageBudget,
    Selection,
    select_passages,
    truncate,
    truncate_at_sentence,
)
from rag_posfix.errors import ConfigError, PromptTooLongError
from tests.support.texts import texts
from tests.support.toy_encoder import ToyEncoder
from tests.support.vocabularies import VOCABULARIES, base


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([], 10, Selection(())),
        ([4, 5, 6], 15, Selection((0, 1, 2))),
        ([4, 5, 6], 14, Selection((0, 1))),
        ([4, 9, 6], 10, Selection((0, 2))),
        ([10, 1], 10, Selection((0,))),
        ([11, 1], 10, Selection((0,), cut=(0,))),
    ],
)
def test_worked_examples(sizes, budget, expected):
    assert select_passages(sizes, budget) == expected


def test_counting_ends_when_nothing_more_can_fit():
    counted = []

    def sizes():
        for size in (5, 4, 7, 7):
            counted.append(size)
            yield size

    assert select_passages(sizes(), 10, smallest=2) == Selection((0, 1))
    assert counted == [5, 4]


@pytest.mark.parametrize(("budget", "kept"), [(7, (0,)), (8, (0, 1))])
def test_a_passage_may_fill_what_is_left_exactly(budget, kept):
    # Of 8, 3 are left, as many as the smallest passage has; of 7, 2, and nothing is tried any more.
    assert select_passages(iter((5, 3)), budget, smallest=3) == Selection(kept)
    assert select_passages(iter((5, 2)), 7, smallest=3) == Selection((0,))


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 60))
def test_kept_passages_fit_and_no_skipped_one_would_have(sizes, budget):
    selection = select_passages(sizes, budget)
    if selection.cut:
        assert sizes[0] > budget
        return
    left = budget
    for rank, size in enumerate(sizes):
        assert (rank in selection.selected) == (size <= left)
        left -= size if rank in selection.selected else 0
    assert left >= 0


@given(texts(), st.integers(FEWEST_TOKENS, 40))
def test_a_cut_text_is_a_beginning_of_the_text_and_as_long_as_possible(text, limit):
    encoder = ToyEncoder()
    whole = encoder.encode_text(text)
    cut = truncate(whole, limit, encoder.decode)
    assert list(cut) == whole[: len(cut)]
    assert encoder.decode(whole).startswith(encoder.decode(cut))
    assert min(limit, len(whole)) - 3 <= len(cut) <= limit


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("cut", [truncate, truncate_at_sentence])
@given(st.text("aé日本語😀한글 தமி€x.\n", max_size=30), st.integers(FEWEST_TOKENS, 40))
@example("한국어입니다그리고또다른말이다", 16)
@example("한국어입니다그리고또다른말이다", 17)
def test_a_cut_text_is_a_beginning_of_the_text_in_every_kind_of_vocabulary(vocabulary, cut, text, limit):
    tokenizer = base(vocabulary)
    whole = tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    assert decode(whole).startswith(decode(cut(whole, limit, decode)))


def test_a_limit_below_a_few_tokens_is_refused():
    with pytest.raises(PromptTooLongError, match="0 tokens are left"):
        truncate([65] * 9, -5, ToyEncoder().decode)
    with pytest.raises(PromptTooLongError, match="3 tokens are left"):
        truncate([65] * 9, 3, ToyEncoder().decode)
    assert len(truncate([65] * 9, 4, ToyEncoder().decode)) == 4


def test_a_tokenizer_without_clean_borders_still_gets_a_cut():
    assert truncate([65] * 30, 20, lambda ids: f"{len(ids)}") == (65,) * 20


class TestLimits:
    def test_they_fall_from_the_best_to_the_last_and_add_up(self):
        # 5 passages of 100 fit into 500: 100 (1 + 0.5 (1 - 2 r / 4)).
        limit = PassageBudget(100, 0.5).limits(count=8, budget=500)
        assert [limit(rank) for rank in range(7)] == [150, 125, 100, 75, 50, 50, 50]

    def test_a_limit_that_floats_miss_by_a_little_is_whole(self):
        # 100 (1 + .15) = 114.99999999999999 in floats.
        limit = PassageBudget(100, 0.15).limits(count=2, budget=200)
        assert [limit(0), limit(1)] == [115, 85]

    def test_the_number_of_passages_counts_where_it_is_smaller(self):
        limit = PassageBudget(100, 1.0).limits(count=3, budget=5000)
        assert [limit(rank) for rank in range(4)] == [200, 100, 0, 0]

    def test_without_shrinking_all_are_equal_and_without_tokens_there_are_none(self):
        assert [PassageBudget(100).limits(9, 500)(rank) for rank in (0, 8)] == [100, 100]
        assert PassageBudget().limits(9, 500)(8) == 500
        assert PassageBudget(100, 0.5).limits(1, 500)(0) == 100

    @given(st.integers(1, 200), st.floats(0, 1), st.integers(1, 30), st.integers(1, 3000))
    def test_they_never_rise_and_stay_within_the_average_together(self, tokens, shrink, count, budget):
        limit = PassageBudget(tokens, shrink).limits(count, budget)
        limits = [limit(rank) for rank in range(max(min(count, budget // tokens), 1))]
        assert limits == sorted(limits, reverse=True)
        assert tokens * len(limits) - len(limits) <= sum(limits) <= tokens * len(limits)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tokens": 0}, "tokens=0 must be >= 1"),
            ({"tokens": 9, "shrink": 1.5}, "shrink=1.5 must be between 0 and 1"),
            ({"shrink": 0.5}, "shrink=0.5 needs tokens"),
            ({"overflow": "cut"}, "overflow='cut' must be one of drop, truncate, error"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            PassageBudget(**arguments)


class TestOverflow:
    def test_a_passage_above_its_limit_is_skipped_but_for_the_best_which_is_cut(self):
        limits = (6, 5, 4, 3)
        assert select_passages([9, 6, 4, 3], 100, limit=limits.__getitem__) == Selection((0, 2, 3), cut=(0,))

    def test_truncating_cuts_each_to_its_limit_and_the_last_to_what_is_left(self):
        cuts = []

        def cut(rank, allowed):
            cuts.append((rank, allowed))
            return allowed - 1  # a sentence ended one token earlier

        found = select_passages([9, 9, 9, 9], 14, limit=lambda rank: 6, overflow="truncate", cut=cut)
        # 5 of 14, 5 of 9, then 4 are left.
        assert (cuts, found) == ([(0, 6), (1, 6), (2, 4)], Selection((0, 1, 2), cut=(0, 1, 2)))

    def test_a_passage_that_cannot_be_cut_is_left_out(self):
        found = select_passages([3, 9, 2], 20, limit=lambda rank: 4, overflow="truncate", cut=lambda rank, allowed: 0)
        assert found == Selection((0, 2))

    def test_an_error_names_the_first_that_is_too_long(self):
        assert select_passages([3, 9, 2], 10, overflow="error") == Selection((0,), too_long=(1, 7))
        assert select_passages([3, 4, 2], 10, overflow="error") == Selection((0, 1, 2))


def at_sentence(text, limit):
    encoder = ToyEncoder()
    return encoder.decode(truncate_at_sentence(encoder.encode_text(text), limit, encoder.decode))


class TestSentences:
    @pytest.mark.parametrize(
        ("text", "limit", "expected"),
        [
            ("One two. Three four. Five.", 22, "One two. Three four."),
            ("One two. Three four. Five.", 19, "One two."),
            ("One two. Three four. Five.", 7, "One two"),
            ("One two? Three! Four.", 17, "One two? Three!"),
            ('He said "no." Then he left.', 20, 'He said "no."'),
            ("It is 3.5 metres high", 10, "It is 3.5 "),
            ("A. Then nothing ends any more", 12, "A. Then noth"),
            ("Ab. Then nothing ends any more", 12, "Ab. Then not"),  # three tokens are too few
            ("Abc. Then nothing ends any more", 12, "Abc."),
            ("No sentence ends here at all", 12, "No sentence "),
            ("\u6771\u4eac\u3002\u5927\u962a\u3002", 16, "\u6771\u4eac\u3002"),
        ],
    )
    def test_worked_examples(self, text, limit, expected):
        assert at_sentence(text, limit) == expected

    @given(texts(12), st.integers(FEWEST_TOKENS, 60))
    def test_what_is_kept_is_a_beginning_no_longer_than_a_plain_cut(self, text, limit):
        encoder = ToyEncoder()
        whole = encoder.encode_text(text)
        kept, plain = (cut(whole, limit, encoder.decode) for cut in (truncate_at_sentence, truncate))
        assert list(kept) == whole[: len(kept)]
        assert len(kept) <= len(plain)
        assert len(kept) >= min(FEWEST_TOKENS, len(plain))
