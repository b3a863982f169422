import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.assembly.budget import FEWEST_TOKENS, Selection, choose, truncate
from rag_posfix.errors import PromptTooLongError
from tests.support.texts import texts
from tests.support.toy_encoder import ToyEncoder


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([], 10, Selection(())),
        ([4, 5, 6], 15, Selection((0, 1, 2))),
        ([4, 5, 6], 14, Selection((0, 1))),
        ([4, 9, 6], 10, Selection((0, 2))),
        ([10, 1], 10, Selection((0,))),
        ([11, 1], 10, Selection((0,), cut=True)),
    ],
)
def test_worked_examples(sizes, budget, expected):
    assert choose(sizes, budget) == expected


def test_counting_ends_when_nothing_more_can_fit():
    counted = []

    def sizes():
        for size in (5, 4, 7, 7):
            counted.append(size)
            yield size

    assert choose(sizes(), 10, smallest=2) == Selection((0, 1))
    assert counted == [5, 4]


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 60))
def test_kept_passages_fit_and_no_skipped_one_would_have(sizes, budget):
    selection = choose(sizes, budget)
    if selection.cut:
        assert sizes[0] > budget
        return
    left = budget
    for rank, size in enumerate(sizes):
        assert (rank in selection.kept) == (size <= left)
        left -= size if rank in selection.kept else 0
    assert left >= 0


@given(texts(), st.integers(FEWEST_TOKENS, 40))
def test_a_cut_text_is_a_beginning_of_the_text_and_as_long_as_possible(text, limit):
    encoder = ToyEncoder()
    whole = encoder.encode_text(text)
    cut = truncate(whole, limit, encoder.decode)
    assert list(cut) == whole[: len(cut)]
    assert encoder.decode(whole).startswith(encoder.decode(cut))
    assert min(limit, len(whole)) - 3 <= len(cut) <= limit


def test_nothing_is_cut_that_fits():
    assert truncate([1, 2], 2, ToyEncoder().decode) == (1, 2)


def test_a_limit_below_a_few_tokens_is_refused():
    with pytest.raises(PromptTooLongError, match="0 tokens are left"):
        truncate([65] * 9, -5, ToyEncoder().decode)
    with pytest.raises(PromptTooLongError, match="3 tokens are left"):
        truncate([65] * 9, 3, ToyEncoder().decode)
    assert len(truncate([65] * 9, 4, ToyEncoder().decode)) == 4


def test_a_tokenizer_without_clean_borders_still_gets_a_cut():
    assert truncate([65] * 30, 20, lambda ids: f"{len(ids)}") == (65,) * 20
