"""Permutation experiment: how many answers change when the passages are shuffled.

Order-invariant methods run with every order too, so that the experiment tests their claim.
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
from rag_posfix.evaluation.answers.experiment import (
    OWN_SCORER,
    Arrangement,
    answers_head,
    arrangement_rerankers,
    check_arrangements,
    engine_facts,
    load_models,
)
from rag_posfix.evaluation.answers.position_summary import not_measured
from rag_posfix.evaluation.data.questions import GoldPosition, PositionExample, take_examples
from rag_posfix.evaluation.figures import draw_permutations, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, silent
from rag_posfix.evaluation.statistics import bootstrap_interval, mean, mean_if_known
from rag_posfix.settings import Settings

__all__ = ["PermutationRow", "evaluate_permutations"]


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
            None if the generator returns no log-probabilities.
        answer: The generated answer.
        accuracy: best_subspan_em of the first line.
        accuracy_full_text: best_subspan_em of the whole answer.
        log_probability: Mean log-probability per token of the first accepted answer; None if the generator returns no
            log-probabilities.
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
        progress: Progress callback (``evaluation.record.Progress``).

    Raises:
        ConfigError: a method, the model or a setting is wrong.
        EvaluationError: the file cannot be used, too few passages or orders, or passages do not fit the context
            window.
    """
    examples = take_examples(data, limit, skip)
    arrangements = check_arrangements(choices)
    draw_orders(documents, orders, seed, "")  # before the model is loaded
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
    return with_figure(ExperimentRecord(head, [asdict(row) for row in rows]).write(out), draw_permutations)


def draw_orders(count: int, n_orders: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Return distinct orders of ``count`` passages for the question ``name``: the original one, then random ones."""
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
    """A question, its passages in the first order by scorer (None for one left out), and the orders to put them in."""

    example: PositionExample
    passages: Mapping[str, Sequence[Document | None]]
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
    """Answer every question with each method in each order, the same orders for every method.

    The first order has the gold passage first and the distractors as the data gives them. Eight questions are taken
    at a time, and those of one method in their first, second, ... order are answered together: an answer has the same
    neighbours in every order, so that rounding within a batch changes none.

    Args:
        reranker: Scores the passages of a question, once, for arrangements without a reranker.
    """
    arrangements = check_arrangements(choices)
    scorers = {OWN_SCORER: reranker, **rerankers}
    labels = dict.fromkeys(arrangement.scorer for arrangement in arrangements)
    total = len(examples) * len(arrangements) * n_orders
    rows: list[PermutationRow] = []
    for start in range(0, len(examples), QUESTIONS_TOGETHER):
        questions = []
        for example in examples[start : start + QUESTIONS_TOGETHER]:
            names = [str(document.id) for document in example.documents(n_documents)]
            scored = {label: score_passages(scorers[label], example, n_documents) for label in labels}
            passages = {label: [by_id.get(name) for name in names] for label, by_id in scored.items()}
            questions.append(_Question(example, passages, draw_orders(n_documents, n_orders, seed, example.id)))
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
    ] = []  # by question: its first answer, and log-probabilities of its first token
    for number in range(n_orders):
        trials = []
        for question in questions:
            passages = [question.passages[arrangement.scorer][index] for index in question.orders[number]]
            documents = tuple(passage for passage in passages if passage is not None)
            trials.append(Trial(question.example, documents, arrangement.mitigation, arrangement.order))
        answers = answer_all(engine, trials, max_new_tokens)
        for index, (question, trial, (answer, log_probs)) in enumerate(zip(questions, trials, answers, strict=True)):
            if number == 0:
                first.append((answer.answer, log_probs))
            first_answer, first_log_probs = first[index]
            order = question.orders[number]
            gold = tuple(map(order.index, range(len(question.example.gold))))  # the first passages of the first order
            yield PermutationRow(
                question=question.example.id,
                condition=arrangement.label,
                order=order,
                gold_position=gold[0] if len(gold) == 1 else gold,
                changed=answer.answer != first_answer,
                logit_difference=largest_difference(log_probs, first_log_probs),
                asked=question.example.question,
                accepted=question.example.answers,
                passages=tuple(str(document.id) for document in trial.documents),
                **asdict(answer),
            )


def largest_difference(a: Tensor | None, b: Tensor | None) -> float | None:
    """Return the largest absolute difference; two infinities of one sign do not differ. None if a side is None."""
    if a is None or b is None:
        return None
    return float((a - b).abs().where(a != b, 0.0).max())


def summarize_permutations(rows: Sequence[PermutationRow]) -> dict[str, Any]:
    """Return how much each method's answers depend on the order, with intervals by question.

    ``flip_rate`` is the share of (question, order other than the first) with another answer than the first order;
    ``any_flip`` the share of questions with at least one such order; ``max_logit_difference`` the largest difference
    of a first token's log-probability between an order and the first; ``accuracy`` the mean over all orders. Numbers
    that the generator does not return are None, and ``not_measured`` says why.
    """
    tables: dict[str, dict[str, list[PermutationRow]]] = {}
    for row in rows:
        tables.setdefault(row.condition, {}).setdefault(row.question, []).append(row)
    methods = {name: _summary(list(table.values())) for name, table in tables.items()}
    verdict = []
    for name, scores in methods.items():
        low, high = scores["flip_rate_ci95"]
        verdict.append(
            f"{name}: {scores['flip_rate']:.0%} of the answers change with the order of the passages (95 % interval "
            f"{low:.0%} to {high:.0%}); accuracy {scores['accuracy']:.2f}."
        )
    return {
        "mitigations": methods,
        "verdict": verdict,
        "n": len({row.question for row in rows}),
        "orders": max((len(orders) for table in tables.values() for orders in table.values()), default=0),
        **not_measured([row.log_probability for row in rows]),
    }


def _summary(questions: Sequence[Sequence[PermutationRow]]) -> dict[str, Any]:
    """Return the summary of one method from one list per question, its first order first."""
    flips = [mean([float(row.changed) for row in rows[1:]]) for rows in questions]
    columns: dict[str, Sequence[float | None]] = {
        "flip_rate": flips,
        "any_flip": [float(share > 0) for share in flips],
        "accuracy": [mean([row.accuracy for row in rows]) for rows in questions],
        "accuracy_full_text": [mean([row.accuracy_full_text for row in rows]) for rows in questions],
        "log_probability": [mean_if_known([row.log_probability for row in rows]) for rows in questions],
    }
    summary: dict[str, Any] = {}
    for name, values in columns.items():
        summary[name] = mean_if_known(values)
        measured = [[value] for value in values if value is not None]
        summary[f"{name}_ci95"] = list(bootstrap_interval(measured, mean)) if summary[name] is not None else None
    differences = [row.logit_difference for rows in questions for row in rows]
    summary["max_logit_difference"] = None if None in differences else max(filter(None, differences), default=0.0)
    summary["seconds"] = mean([row.seconds for rows in questions for row in rows])
    return summary
