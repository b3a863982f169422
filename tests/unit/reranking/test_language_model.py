"""Which of many candidates are read in one prompt, what is cut to fit, and exclusive use of the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, PromptTooLongError
from rag_posfix.reranking import AttentionSortingReranker, ListwiseReranker
from rag_posfix.reranking.language_model import common_length_limit
from tests.support.reader import ScriptedReader, order, raw, scores


def documents(*texts):
    return [Document(page_content=text) for text in texts]


def by_number(text, place):
    return float(int(text))


def sorting(values=by_number, **options):
    reader = ScriptedReader(values, context_window=options.pop("context_window", 100_000))
    return reader, AttentionSortingReranker(generator=reader, rounds=1, normalize=True, **options)


def test_of_more_candidates_than_the_window_the_first_are_read_and_the_others_stay_below():
    reader, reranker = sorting(window=3)
    result = reranker.compress_documents(documents("1", "3", "2", "9", "8"), "why?")
    assert order(result) == ["3", "2", "1", "9", "8"]
    assert [sorted(texts) for texts in reader.seen] == [["1", "2", "3"]]
    assert scores(result) == pytest.approx({"3": 0.5, "2": 1 / 3, "1": 1 / 6, "9": 0.0, "8": 0.0})
    assert result[3].metadata["reranking"] == {"reranker": "attention_sorting", "raw_score": None, "read": False}


@pytest.mark.slow
def test_ten_thousand_candidates_are_one_window_and_the_rest():
    reader, reranker = sorting()
    given = documents(*map(str, range(10_000)))
    result = reranker.compress_documents(given, "why?")
    assert order(result) == [*map(str, range(19, -1, -1)), *map(str, range(20, 10_000))]
    assert len(reader.seen) == 1


def test_with_a_stride_windows_move_from_the_back_and_carry_the_best_forward():
    reader, reranker = sorting(window=4, stride=2)
    result = reranker.compress_documents(documents("1", "2", "3", "4", "5", "6", "7"), "why?")
    # 4 5 6 7 -> 7 6 5 4; 2 3 7 6 -> 7 6 3 2; 1 7 6 3 -> 7 6 3 1; then 2 5 4: one pass of a bubble, as designed.
    assert [sorted(texts) for texts in reader.seen] == [list("4567"), list("2367"), list("1367")]
    assert order(result) == list("7631254")
    assert scores(result) == pytest.approx({text: (7 - place) / 7 for place, text in enumerate("7631254")})
    assert raw(result) == {text: float(text) for text in "1234567"}


def test_the_first_window_is_read_once_where_the_stride_ends_on_it():
    reader, reranker = sorting(window=4, stride=2)
    reranker.compress_documents(documents("1", "2", "3", "4", "5", "6"), "why?")
    assert [sorted(texts) for texts in reader.seen] == [list("3456"), list("1256")]


@pytest.mark.parametrize("stride", [None, 2])
def test_as_many_candidates_as_the_window_are_scored_by_what_was_read(stride):
    _, reranker = sorting(window=3, stride=stride)
    result = reranker.compress_documents(documents("1", "2", "3"), "why?")
    assert scores(result) == pytest.approx({"3": 3 / 6, "2": 2 / 6, "1": 1 / 6})


def test_no_stride_is_needed_where_all_fit():
    reader, reranker = sorting(window=7, stride=3)
    assert order(reranker.compress_documents(documents("1", "2", "3"), "why?")) == ["3", "2", "1"]
    assert len(reader.seen) == 1


def test_windows_must_overlap():
    with pytest.raises(ConfigError, match="stride=20 must be below window=20"):
        sorting(stride=20)


def test_equal_texts_are_read_once_and_blank_ones_not_at_all():
    reader, reranker = sorting()
    result = reranker.compress_documents(documents("1", " ", "2", "1"), "why?")
    assert order(result) == ["2", "1", "1", " "]
    assert [sorted(texts) for texts in reader.seen] == [["1", "2"]]
    assert result[3].metadata["relevance_score"] == 0.0


def test_only_the_longest_documents_are_cut_to_fit_together():
    lengths = {}

    def length(text, place):
        lengths[text[0]] = len(text)
        return 1.0

    _, reranker = sorting(length, context_window=1000)
    result = reranker.compress_documents(documents("a" * 400, "b" * 5000, "c" * 20), "why?")
    said = {one.page_content[0]: one.metadata["reranking"].get("long_document") for one in result}
    assert said == {"a": None, "b": "truncated", "c": None}
    assert lengths["a"] == 400
    assert lengths["c"] == 20
    assert 400 < lengths["b"] < 480, "below the 512 that a document may have"


def test_a_window_without_room_is_told():
    _, reranker = sorting(context_window=400)
    with pytest.raises(PromptTooLongError, match=r"rank fewer documents at a time \(window\)"):
        reranker.compress_documents(documents(*(f"{n:040d}" for n in range(20))), "why?")


def test_the_written_ranking_has_room():
    reader = ScriptedReader(context_window=900)
    given = documents(*(chr(97 + n) * 300 for n in range(5)))
    ListwiseReranker(generator=reader).compress_documents(given, "why?")
    # The reader checks that the prompt fits with the answer; nothing much is left unused.
    assert [len(text) for text in reader.seen[0]] == [len(reader.seen[0][0])] * 5
    assert 60 < len(reader.seen[0][0]) < 300


@pytest.mark.parametrize(
    ("sizes", "room", "limit"),
    [
        ([3, 5], 7, 4),  # 3 + 4
        ([3, 3], 6, 3),
        ([3, 3], 5, 2),
        ([2, 9, 9], 12, 5),  # 2 + 5 + 5
        ([2, 9, 9], 13, 5),  # one is left over, and two want it
        ([2, 9, 9], 14, 6),
        ([2, 9, 9], 100, 9),
        ([4], 0, 0),
        ([], 5, 0),
    ],
)
def test_the_common_limit_by_hand(sizes, room, limit):
    assert common_length_limit(sizes, room) == limit


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(0, 3000))
def test_the_common_limit_is_the_largest_that_fits(sizes, room):
    limit = common_length_limit(sizes, room)
    assert sum(min(size, limit) for size in sizes) <= room
    if limit < max(sizes):
        assert sum(min(size, limit + 1) for size in sizes) > room
