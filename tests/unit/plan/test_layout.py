import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span


def layout_of(passages: list[tuple[str, list[int]]], **changes) -> Layout:
    """Lay out passages of (key, tokens) between a prefix of two tokens and a suffix of three."""
    token_ids, spans = [1, 2], []
    for _, tokens in passages:
        spans.append(Span(len(token_ids), len(token_ids) + len(tokens)))
        token_ids.extend(tokens)
    end = len(token_ids)
    fields = {
        "token_ids": (*token_ids, 7, 8, 9),
        "prefix": Span(0, 2),
        "passages": tuple(spans),
        "texts": tuple(spans),
        "suffix": Span(end, end + 3),
        "question": Span(end, end + 1),
        "keys": tuple(key for key, _ in passages),
    }
    return Layout(**{**fields, **changes})


@pytest.fixture
def layout() -> Layout:
    return layout_of([("b", [10, 11]), ("a", [20, 21, 22])])


def test_a_span_counts_and_slices_its_tokens():
    span = Span(2, 5)
    assert len(span) == 3
    assert list(range(10))[span.slice] == [2, 3, 4]
    assert len(Span(4, 4)) == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_span_must_run_forwards_from_zero(start, stop):
    with pytest.raises(ConfigError, match=rf"span \[{start}, {stop}\) must satisfy"):
        Span(start, stop)


def test_tokens_of_each_part_together_are_the_prompt(layout):
    parts = [layout.prefix, *layout.passages, layout.suffix]
    assert [layout.tokens(part) for part in parts] == [(1, 2), (10, 11), (20, 21, 22), (7, 8, 9)]
    assert sum(map(layout.tokens, parts), ()) == layout.token_ids
    assert layout.n_passages == 2


def test_a_prompt_without_passages_or_prefix_is_a_layout():
    bare = Layout((5,), Span(0, 0), (), (), Span(0, 1), Span(0, 1), ())
    assert bare.n_passages == 0
    assert bare.canonical_order() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": Span(1, 2)}, "expected a start of 0"),
        ({"passages": (Span(2, 4), Span(5, 7))}, "expected a start of 4"),
        ({"passages": (Span(2, 5), Span(4, 7))}, "expected a start of 5"),
        ({"suffix": Span(7, 9)}, "cover its 10 tokens"),
        ({"token_ids": tuple(range(7)), "suffix": Span(7, 7)}, "end in a suffix"),
        ({"texts": (Span(2, 4),)}, "one text, key and relevance per passage"),
        ({"keys": ("a", "b", "c")}, "one text, key and relevance per passage"),
        ({"relevance": (0.5,)}, "one text, key and relevance per passage"),
    ],
)
def test_parts_must_touch_cover_the_prompt_and_agree_in_number(layout, changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(layout, **changes)


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        ((), (2,)),  # the prefix of two tokens
        ((300, 209), (511,)),  # 2 + 300 + 209: one short run
        ((300, 210), (512,)),  # 2 + 300 + 210: long enough
        ((300, 210, 1), (512, 513)),  # what remains is a run, so that another question finds all passages
        ((510, 0, 0), (512,)),
        ((600, 100, 400, 12, 50), (602, 1114, 1164)),  # 2 + 600; 100 + 400 + 12; 50
        ((150,) * 20, (602, 1202, 1802, 2402, 3002)),  # 2 + 4 * 150, then 4 * 150 each
    ],
)
def test_a_run_ends_with_the_passage_that_brings_it_to_512_tokens(lengths, ends):
    assert layout_of([("a", [3] * length) for length in lengths]).boundaries == ends


def test_a_long_prefix_is_a_run_and_a_prompt_without_passages_has_none():
    spans = (Span(600, 700), Span(700, 710))
    layout = Layout((3,) * 715, Span(0, 600), spans, spans, Span(710, 715), Span(710, 715), ("a", "b"))
    assert layout.boundaries == (600, 710)
    assert Layout.plain([1, 2, 3]).boundaries == ()


@given(st.lists(st.integers(0, 700), min_size=1, max_size=8), st.data())
def test_prompts_that_begin_with_the_same_passages_begin_with_the_same_runs(lengths, data):
    layout = layout_of([("a", [3] * length) for length in lengths])
    first = layout.select(range(data.draw(st.integers(0, len(lengths)))))
    shared = [end for end in layout.boundaries[:-1] if end <= first.suffix.start]
    assert list(first.boundaries[: len(shared)]) == shared
    assert set(first.boundaries) <= {*shared, first.suffix.start}


def test_the_canonical_order_sorts_by_key(layout):
    assert layout.canonical_order() == (1, 0)


passages = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=4)), max_size=6)


@given(passages.flatmap(lambda some: st.tuples(st.just(some), st.permutations(some))))
def test_the_canonical_order_gives_the_same_passages_for_every_order_of_the_prompt(orders):
    def in_canonical_order(layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
        return [(layout.keys[i], layout.tokens(layout.passages[i])) for i in layout.canonical_order()]

    first, second = map(layout_of, orders)
    assert in_canonical_order(first) == in_canonical_order(second)
    assert sorted(first.canonical_order()) == list(range(first.n_passages))


def test_passages_are_ranked_by_relevance_and_equal_ones_by_content():
    some = [("b", 0.5), ("d", 0.9), ("a", 0.5), ("c", 0.5)]
    for order in itertools.permutations(some):
        layout = layout_of([(key, [3]) for key, _ in order], relevance=tuple(value for _, value in order))
        assert "".join(layout.keys[i] for i in layout.ranked()) == "dabc"
        assert "".join(layout.keys[i] for i in replace(layout, relevance=None).ranked()) == "abcd"


def test_equal_passages_of_different_relevance_have_one_canonical_order():
    """Otherwise a method that weighs them by relevance breaks the tie by arrival."""
    spans = (Span(0, 2), Span(2, 4), Span(4, 5))

    def ranked(relevance):
        layout = Layout(
            (7, 8, 7, 8, 9, 1), Span(0, 0), spans, spans, Span(5, 6), Span(5, 6), ("a", "a", "b"), relevance
        )
        return [relevance[i] for i in layout.canonical_order()], [relevance[i] for i in layout.ranked()]

    assert ranked((0.2, 0.9, 0.5)) == ranked((0.9, 0.2, 0.5)) == ([0.9, 0.2, 0.5], [0.9, 0.5, 0.2])
