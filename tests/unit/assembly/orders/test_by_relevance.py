import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_posfix.assembly.orders import permute


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, ()),
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 3, 2)),
        (4, (1, 3, 4, 2)),
        (5, (1, 3, 5, 4, 2)),
        (6, (1, 3, 5, 6, 4, 2)),
    ],
)
def test_ends_first_by_rank(n, expected):
    falling = [1 - i / 10 for i in range(n)]
    assert tuple(i + 1 for i in permute("ends_first", falling)) == expected
    rising = falling[::-1]
    assert tuple(n - i for i in permute("ends_first", rising)) == expected
    assert tuple(i + 1 for i in permute("ends_first", [None] * n)) == expected


@pytest.mark.parametrize("n", range(1, 7))
def test_relevance_reverse_and_original_by_rank(n):
    rising = [i / 10 for i in range(n)]
    assert permute("relevance", rising) == tuple(reversed(range(n)))
    assert permute("reverse", rising) == tuple(range(n))
    assert permute("original", rising) == tuple(range(n))


def test_ties_and_missing_scores_keep_the_given_order():
    assert permute("relevance", [None, 0.5, 0.9, 0.5, None]) == (2, 1, 3, 0, 4)
    assert permute("reverse", [None, 0.5, 0.9, 0.5, None]) == (4, 0, 3, 1, 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_best_document_is_first_for_every_n(relevance):
    for name in ("relevance", "ends_first"):
        assert relevance[permute(name, relevance)[0]] == max(relevance)
    assert relevance[permute("reverse", relevance)[-1]] == max(relevance)


def test_random_depends_on_the_seed_alone_and_not_on_the_process():
    here = permute("random", [None] * 8, 7)
    assert here == permute("random", [0.1 * i for i in range(8)], 7)
    assert len({permute("random", [None] * 8, seed) for seed in range(20)}) > 15
    code = "from rag_posfix.assembly.orders import permute; print(permute('random', [None] * 8, 7))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert there.strip() == str(here)


def test_every_position_is_equally_likely_under_random():
    firsts = [permute("random", [None] * 4, seed)[0] for seed in range(400)]
    assert all(70 < firsts.count(i) < 130 for i in range(4))
