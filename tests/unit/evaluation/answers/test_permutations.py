import math

import pytest
import torch
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.positions import (
    PermutationRow,
    answer_in_orders,
    draw_orders,
    largest_difference,
    summarize_permutations,
)
from rag_posfix.evaluation.data.questions import PositionExample
from tests.support.order_biased import OrderBiasedGenerator
from tests.support.tiny_evaluation import EXAMPLES, Alphabetical, CountedForwards, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def sweep(engine, names=("none", "context_experts"), examples=EXAMPLES, **options):
    settings = {"n_orders": 3, "n_documents": 3, "reranker": Alphabetical(), "max_new_tokens": 2}
    return answer_in_orders(engine, examples, [MitigationChoice(name) for name in names], **{**settings, **options})


class TestSweep:
    def test_every_method_answers_every_question_in_the_same_orders(self, engine):
        reported = []
        rows = sweep(engine, progress=lambda *at: reported.append(at))
        assert reported == [(done, 18) for done in range(1, 19)]
        orders = {
            name: [row.order for row in rows if row.condition == name and row.question == "1"]
            for name in ("none", "context_experts")
        }
        assert orders["none"] == orders["context_experts"]
        assert orders["none"][0] == (0, 1, 2)
        assert len(set(orders["none"])) == 3
        assert all(row.gold_position == row.order.index(0) for row in rows)

    def test_the_passages_stand_in_the_order_that_the_row_names(self, engine, monkeypatch):
        seen = []
        assemble = Assembler.assemble

        def watched(self, question, documents, **options):
            seen.append((question, [document.id for document in documents]))
            return assemble(self, question, documents, **options)

        monkeypatch.setattr(Assembler, "assemble", watched)
        rows = sweep(engine, ("none",), EXAMPLES[:2])
        given = {"0": ["g0", "d00", "d01"], "1": ["g1", "d10", "d11"]}
        assert seen == [(f"Why{row.question}", [given[row.question][i] for i in row.order]) for row in rows]

    def test_the_first_order_differs_from_itself_by_nothing(self, engine):
        first = [row for row in sweep(engine) if row.order == (0, 1, 2)]
        assert len(first) == 6
        assert all(not row.changed and row.logit_difference == 0.0 for row in first)

    def test_the_unmodified_model_depends_on_the_order_and_an_order_free_method_does_not(self, engine):
        rows = sweep(engine, ("none", "context_experts", "parallel_windows"))
        others = [row for row in rows if row.order != (0, 1, 2)]
        assert min(row.logit_difference for row in others if row.condition == "none") > 1e-3
        free = [row for row in others if row.condition != "none"]
        assert max(row.logit_difference for row in free) < 1e-5
        assert not any(row.changed for row in free)

    def test_the_difference_is_that_of_the_first_tokens_log_probabilities(self, engine):
        rows = sweep(engine, ("none",), EXAMPLES[:1])
        assembler = Assembler(engine.encoder, 180)

        def first_token(order):
            given = EXAMPLES[0].documents(3, 0)
            layout = assembler.assemble(
                "Why0", [given[i] for i in order], order="original", max_new_tokens=2
            ).layout  # fmt: skip
            return engine.next_log_probs(layout)

        for row in rows:
            expected = (first_token(row.order) - first_token((0, 1, 2))).abs().max()
            assert row.logit_difference == pytest.approx(float(expected), abs=1e-5)

    def test_an_answer_is_compared_with_that_of_the_same_question_in_its_first_order(self):
        # The answer is the passage that came first: another one in each order that begins with another passage.
        rows = sweep(OrderBiasedGenerator(), ("none",), n_orders=6)
        assert [row.changed for row in rows] == [row.order[0] != 0 for row in rows]
        assert len({row.answer for row in rows}) == 9
        # Of the 5 orders besides the first, 4 begin with another passage.
        found = summarize_permutations(rows)["mitigations"]["none"]
        assert (found["flip_rate"], found["any_flip"]) == (pytest.approx(4 / 5), 1.0)

    def test_of_two_gold_passages_both_places_are_told_in_their_order(self):
        gold = tuple(Document(page_content=f"gold {n}", id=f"g{n}") for n in range(2))
        distractors = tuple(Document(page_content=f"distractor {n}", id=f"d{n}") for n in range(2))
        example = PositionExample("two", "Why?", ("so",), gold, distractors)
        rows = sweep(OrderBiasedGenerator(), ("none",), [example], n_orders=24, n_documents=4)
        assert rows[0].gold_position == (0, 1)
        assert len({row.gold_position for row in rows}) == 12  # 4 places of the first, 3 of the second
        for row in rows:
            assert tuple(row.passages[place] for place in row.gold_position) == ("g0", "g1")

    def test_a_method_that_ignores_the_order_is_run_for_each_order(self, engine):
        with CountedForwards(engine) as one:
            sweep(engine, ("parallel_windows",), EXAMPLES[:1], n_orders=2)
        with CountedForwards(engine) as more:
            sweep(engine, ("parallel_windows",), EXAMPLES[:1], n_orders=6)
        assert len(more.shapes) == 3 * len(one.shapes)

    def test_infinite_scores_that_agree_do_not_differ(self):
        one = torch.tensor([-float("inf"), -1.0, -2.0])
        assert largest_difference(one, one) == 0.0
        assert largest_difference(one, torch.tensor([-float("inf"), -1.5, -2.25])) == 0.5
        assert largest_difference(one, torch.tensor([-3.0, -1.0, -2.0])) == float("inf")


def row(question, number, changed, accuracy, difference, condition="none"):
    return PermutationRow(
        question=question, condition=condition, order=(number, 0), gold_position=0, changed=changed,
        logit_difference=difference, answer="x", accuracy=accuracy, accuracy_full_text=1.0, log_probability=-accuracy,
        seconds=2.0,
    )  # fmt: skip


ROWS = [
    row("a", 0, False, 1.0, 0.0), row("a", 1, True, 0.0, 0.5), row("a", 2, False, 1.0, 0.25),
    row("a", 3, True, 0.0, 1.0),
    row("b", 0, False, 1.0, 0.0), row("b", 1, False, 1.0, 3.5), row("b", 2, False, 1.0, 0.0),
    row("b", 3, False, 1.0, 0.0),
    *[row(question, number, False, 0.0, 0.0, "free") for question in "ab" for number in range(4)],
]  # fmt: skip


def test_the_summary_counts_flips_by_order_and_question_and_averages_over_orders():
    summary = summarize_permutations(ROWS)
    none, free = summary["mitigations"]["none"], summary["mitigations"]["free"]
    # 2 of the 3 other orders of question a and 0 of those of b: 2 of 6; 1 of 2 questions has a change.
    assert none["flip_rate"] == pytest.approx(1 / 3)
    assert none["any_flip"] == 0.5
    # One question alone: 2/3 or 0.
    assert none["flip_rate_ci95"] == pytest.approx([0.0, 2 / 3])
    assert none["any_flip_ci95"] == [0.0, 1.0]
    assert (summary["n"], summary["orders"]) == (2, 4)
    assert summary["verdict"][0] == (
        "none: 33% of the answers change with the order of the passages (95 % interval 0% to 67%); accuracy 0.75."
    )
    # Question a has 2 of 4 right, b 4 of 4.
    assert (none["accuracy"], none["accuracy_ci95"], none["log_probability"]) == (0.75, [0.5, 1.0], -0.75)
    assert (none["max_logit_difference"], none["seconds"]) == (3.5, 2.0)
    assert (free["flip_rate"], free["any_flip"], free["max_logit_difference"]) == (0.0, 0.0, 0.0)
    assert free["flip_rate_ci95"] == [0.0, 0.0]


@pytest.mark.parametrize(("count", "n_orders"), [(2, 2), (3, 6), (4, 24), (10, 5), (120, 3)])
def test_orders_are_distinct_and_start_with_the_given_one(count, n_orders):
    orders = draw_orders(count, n_orders, 0, "question")
    assert len(set(orders)) == n_orders
    assert orders[0] == tuple(range(count))
    assert all(sorted(order) == list(range(count)) for order in orders)


def test_seed_and_name_decide_which_orders_are_drawn():
    assert draw_orders(9, 5, 0, "a") == draw_orders(9, 5, 0, "a")
    assert len({tuple(draw_orders(9, 5, seed, name)) for seed in (0, 1) for name in "ab"}) == 4
    assert draw_orders(9, 5, 0, "a") == draw_orders(9, 7, 0, "a")[:5]


def test_every_passage_comes_to_every_position():
    # 600 draws of 5 passages: each stands at each place 120 times on average, with a deviation of about 10.
    orders = [order for n in range(120) for order in draw_orders(5, 6, 0, str(n))[1:]]
    for position in range(5):
        for passage in range(5):
            share = sum(order[position] == passage for order in orders) / len(orders)
            assert share == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / len(orders)))


@pytest.mark.parametrize(("count", "n_orders", "most"), [(3, 7, 6), (1, 2, 1), (3, 1, 6)])
def test_more_orders_than_there_are_are_refused(count, n_orders, most):
    with pytest.raises(EvaluationError, match=f"orders={n_orders} must be between 2 and {most}, the number of orders"):
        draw_orders(count, n_orders, 0, "")
