"""Permutation experiment: how many answers change when the passages are shuffled.

Order-free methods run with every order too, so that the experiment tests their claim.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.answering import QUESTIONS_TOGETHER, Trial, answer_all, score_passages
from rag_posfix.evaluation.answers.arrangement import OWN_SCORER, Arrangement
from rag_posfix.evaluation.answers.experiment import (
    answers_head,
    arrangement_rerankers,
    checked_arrangements,
    engine_facts,
    load_models,
)
from rag_posfix.evaluation.answers.pictures import draw_permutations
from rag_posfix.evaluation.answers.verdict import not_measured, permutation_verdicts
from rag_posfix.evaluation.data.datasets import take_examples
from rag_posfix.evaluation.data.position_example import GoldPosition, PositionExample
from rag_posfix.evaluation.figures import with_picture
from rag_posfix.evaluation.progress import Progress, silent
from rag_posfix.evaluation.record import ExperimentRecord
from rag_posfix.evaluation.statistics import bootstrap_interval, mean, mean_if_known
from rag_posfix.settings import Settings

__all__ = [
    "PermutationRow",
    "answer_in_orders",
    "draw_orders",
    "evaluate_permutations",
    "largest_difference",
    "summarize_permutations",
]


@dataclass(frozen=True, slots=True)
class PermutationRow:
    """One answer to one question with the passages in one order.

    Attributes:
        question: The question's id.
        condition: Label of the arrangement.
        order: For each position, the position of its passage in the first order; the first order is 0, 1, 2, ...
        gold_position: Position of the gold passage; positions of several.
        changed: Whether the text of the answer differs from that in the first order.
        logit_difference: Largest absolute difference to the first order in the log-probabilities of the first token;
            None from a generator that does not tell them.
        answer: The generated answer.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer; None likewise.
        seconds: Time of the prefill, plus a share of the time to generate its batch.
        asked: The text of the question.
        accepted: The accepted answers.
        passages: Ids of the passages in this order.
    """

    question: str
    condition: str
    order: tuple[int, ...]
    gold_position: GoldPosition
    changed: bool
    logit_difference: float | None
    answer: str
    accuracy: float
    accuracy_full_text: float
    log_probability: float | None
    seconds: float
    asked: str = ""
    accepted: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()


def evaluate_permutations(
    data: Path | Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    orders: int = 4,
    documents: int = 10,
    limit: int | None = None,
    skip: int = 0,
    max_tokens: int = 24,
    seed: int = 0,
    engine: Generator | None = None,
    reranker: Reranker | None = None,
    settings: Settings | None = None,
    out: Path | None = None,
    progress: Progress = silent,
) -> ExperimentRecord:
    """Shuffle the passages and count the answers that change: flip rate, first-token difference, accuracy.

    The record has one row per question, method and order (``PermutationRow``); ``summarize_permutations`` describes
    its summary.

    Args:
        data: A file of Lost-in-the-Middle or HotpotQA rows or in SQuAD's format, or questions.
        choices: Arrangements; a method alone has the order of the experiment and relevance from ``reranker``.
        orders: Orders per question, the given one included; the others are drawn, the same ones for every method.
        documents: Number of passages per prompt.
        limit: Maximum number of questions.
        skip: Number of questions to leave out at the start.
        max_tokens: Maximum number of tokens of an answer.
        engine: The model; loaded by ``settings`` if None.
        reranker: Scores the passages; if None, the embeddings of ``settings``.
        settings: Read from the environment if None.
        out: Folder for the record; None writes nothing.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        ConfigError: a method, the model or a setting is wrong.
        EvaluationError: the file cannot be used, too few passages or orders, or passages do not fit the context
            window.
    """
    examples = take_examples(data, limit, skip)
    arrangements = checked_arrangements(choices)
    draw_orders(documents, orders, seed, "")  # before the model: what cannot be done is told at once
    for example in examples:
        example.documents(documents)
    engine, reranker, relevance = load_models(arrangements, engine, reranker, settings, progress)
    with progress("answering") as report:
        rows = answer_in_orders(
            engine, examples, arrangements, n_orders=orders, n_documents=documents, reranker=reranker, seed=seed,
            max_new_tokens=max_tokens, progress=report,
            rerankers=arrangement_rerankers(arrangements, engine, settings),
        )  # fmt: skip
    used = {
        "documents": documents, "orders": orders, "limit": limit, "skip": skip, "max_tokens": max_tokens, "seed": seed,
        "relevance": relevance, "decoding": "greedy",
    }  # fmt: skip
    head = answers_head("permutations", engine_facts(engine, arrangements), data, used, summarize_permutations(rows))
    return with_picture(ExperimentRecord(head, [asdict(row) for row in rows]).write(out), draw_permutations)


def draw_orders(count: int, n_orders: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Return distinct orders of ``count`` passages: the given one, then random ones.

    Args:
        n_orders: Number of orders, including the given one.
        name: Id of the question; it is part of the seed.

    Raises:
        EvaluationError: there are fewer than ``n_orders`` orders.
    """
    possible = math.factorial(count)
    if not 2 <= n_orders <= possible:
        raise EvaluationError(
            f"orders={n_orders} must be between 2 and {possible}, the number of orders of {count} passages"
        )
    draw = random.Random(f"{seed}:{name}")
    orders = {tuple(range(count)): None}
    while len(orders) < n_orders:
        orders[tuple(draw.sample(range(count), count))] = None
    return list(orders)


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question, its passages in the first order, scored by each reranker, and the orders to put them in."""

    example: PositionExample
    given: Mapping[str, tuple[Document | None, ...]]
    orders: list[tuple[int, ...]]


def answer_in_orders(
    engine: Generator,
    examples: Sequence[PositionExample],
    choices: Sequence[MitigationChoice | Arrangement],
    *,
    n_orders: int,
    n_documents: int,
    reranker: Reranker,
    rerankers: Mapping[str, Reranker] = MappingProxyType({}),
    seed: int = 0,
    max_new_tokens: int = 24,
    progress: Callable[[int, int], None] | None = None,
) -> list[PermutationRow]:
    """Answer every question with each method in each order.

    The first order has the gold passage first and the distractors as the data gives them. Eight questions are taken
    at a time, and those of one method in their first, second, ... order are answered together: an answer has the same
    neighbours in every order, so that rounding within a batch changes none.

    Args:
        engine: The model; the same for all methods.
        n_orders: Orders per question, the first included; the same for every method.
        n_documents: Number of passages per prompt.
        reranker: Scores the passages of a question, once, for arrangements without a reranker.
        max_new_tokens: Maximum number of tokens of an answer.
        progress: Called with (done, total) after each answer.

    Raises:
        EvaluationError: too few distractors, more orders than there are, or passages do not fit the context window.
    """
    arrangements = checked_arrangements(choices)
    scorers = {OWN_SCORER: reranker, **rerankers}
    used = dict.fromkeys(one.scorer for one in arrangements)
    total = len(examples) * len(arrangements) * n_orders
    rows: list[PermutationRow] = []
    for start in range(0, len(examples), QUESTIONS_TOGETHER):
        questions = []
        for example in examples[start : start + QUESTIONS_TOGETHER]:
            names = [str(document.id) for document in example.documents(n_documents)]
            given = {}
            for label in used:
                passages = score_passages(scorers[label], example, n_documents)
                given[label] = tuple(passages.get(name) for name in names)
            questions.append(_Question(example, given, draw_orders(n_documents, n_orders, seed, example.id)))
        for arrangement in arrangements:
            for row in _in_each_order(engine, questions, arrangement, n_orders, max_new_tokens):
                rows.append(row)
                if progress is not None:
                    progress(len(rows), total)
    return rows


def _in_each_order(
    engine: Generator, questions: Sequence[_Question], arrangement: Arrangement, n_orders: int, max_new_tokens: int
) -> Iterator[PermutationRow]:
    first: list[
        tuple[str, Tensor | None]
    ] = []  # by question, in the first order: the answer, and scores of its first token
    for number in range(n_orders):
        orders = [question.orders[number] for question in questions]
        trials = [
            Trial(
                question.example,
                _ordered(question.given[arrangement.scorer], order),
                arrangement.mitigation,
                arrangement.order,
            )
            for question, order in zip(questions, orders, strict=True)
        ]
        for index, (answer, log_probs) in enumerate(answer_all(engine, trials, max_new_tokens)):
            if number == 0:
                first.append((answer.answer, log_probs))
            yield PermutationRow(
                question=questions[index].example.id,
                condition=arrangement.label,
                order=orders[index],
                gold_position=_gold_position(questions[index].example, orders[index]),
                changed=answer.answer != first[index][0],
                logit_difference=largest_difference(log_probs, first[index][1]),
                asked=questions[index].example.question,
                accepted=questions[index].example.answers,
                passages=tuple(str(document.id) for document in trials[index].documents),
                **asdict(answer),
            )


def _gold_position(example: PositionExample, order: Sequence[int]) -> GoldPosition:
    """Return where the gold passages stand, which are the first ones of the first order."""
    found = tuple(map(list(order).index, range(len(example.gold))))
    return found[0] if len(found) == 1 else found


def _ordered(passages: Sequence[Document | None], order: Sequence[int]) -> tuple[Document, ...]:
    """Return the passages in an order; None stands for one that the reranker left out."""
    return tuple(one for one in (passages[index] for index in order) if one is not None)


def largest_difference(one: Tensor | None, other: Tensor | None) -> float | None:
    """Return the largest absolute difference; two infinities of one sign do not differ. None if one is not known."""
    if one is None or other is None:
        return None
    return float((one - other).abs().where(one != other, 0.0).max())


def summarize_permutations(rows: Sequence[PermutationRow]) -> dict[str, Any]:
    """Return how much each method's answers depend on the order, with intervals by question.

    ``flip_rate`` is the share of (question, order other than the first) whose answer is not that of the first order;
    ``any_flip`` the share of questions with at least one such order; ``max_logit_difference`` the largest difference
    of a first token's log-probability between an order and the first; ``accuracy`` the mean over all orders. What the
    generator does not tell is None, and ``not_measured`` says why.
    """
    tables: dict[str, dict[str, list[PermutationRow]]] = {}
    for row in rows:
        tables.setdefault(row.condition, {}).setdefault(row.question, []).append(row)
    methods = {name: _summary(list(table.values())) for name, table in tables.items()}
    return {
        "mitigations": methods,
        "verdict": permutation_verdicts(methods),
        "n": len({row.question for row in rows}),
        "orders": max((len(found) for table in tables.values() for found in table.values()), default=0),
        **not_measured([row.log_probability for row in rows]),
    }


def _summary(questions: Sequence[Sequence[PermutationRow]]) -> dict[str, Any]:
    """Shapes: questions: one list per question, its first order first."""
    flips = [mean([float(row.changed) for row in found[1:]]) for found in questions]
    columns: dict[str, Sequence[float | None]] = {
        "flip_rate": flips,
        "any_flip": [float(share > 0) for share in flips],
        "accuracy": [mean([row.accuracy for row in found]) for found in questions],
        "accuracy_full_text": [mean([row.accuracy_full_text for row in found]) for found in questions],
        "log_probability": [mean_if_known([row.log_probability for row in found]) for found in questions],
    }
    summary: dict[str, Any] = {}
    for name, values in columns.items():
        summary[name] = mean_if_known(values)
        known = [[value] for value in values if value is not None]
        summary[f"{name}_ci95"] = list(bootstrap_interval(known, mean)) if summary[name] is not None else None
    differences = [row.logit_difference for found in questions for row in found]
    summary["max_logit_difference"] = None if None in differences else max(filter(None, differences), default=0.0)
    summary["seconds"] = mean([row.seconds for found in questions for row in found])
    return summary
