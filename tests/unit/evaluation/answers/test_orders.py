import math

import pytest

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.orders import drawn_orders


@pytest.mark.parametrize(("count", "n_orders"), [(2, 2), (3, 6), (4, 24), (10, 5), (120, 3)])
def test_orders_are_distinct_and_start_with_the_given_one(count, n_orders):
    orders = drawn_orders(count, n_orders, 0, "question")
    assert len(set(orders)) == n_orders
    assert orders[0] == tuple(range(count))
    assert all(sorted(order) == list(range(count)) for order in orders)


def test_seed_and_name_decide_which_orders_are_drawn():
    assert drawn_orders(9, 5, 0, "a") == drawn_orders(9, 5, 0, "a")
    assert len({tuple(drawn_orders(9, 5, seed, name)) for seed in (0, 1) for name in "ab"}) == 4
    assert drawn_orders(9, 5, 0, "a") == drawn_orders(9, 7, 0, "a")[:5]


def test_every_passage_comes_to_every_place():
    # 600 draws of 5 passages: each stands at each place 120 times on average, with a deviation of about 10.
    orders = [order for n in range(120) for order in drawn_orders(5, 6, 0, str(n))[1:]]
    for place in range(5):
        for passage in range(5):
            share = sum(order[place] == passage for order in orders) / len(orders)
            assert share == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / len(orders)))


@pytest.mark.parametrize(("count", "n_orders", "most"), [(3, 7, 6), (1, 2, 1), (3, 1, 6)])
def test_more_orders_than_there_are_are_refused(count, n_orders, most):
    with pytest.raises(EvaluationError, match=f"orders={n_orders} must be between 2 and {most}, the number of orders"):
        drawn_orders(count, n_orders, 0, "")
