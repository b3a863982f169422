"""How much the answer to one question depends on the order of its documents: the orders, and what the answers say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvaluatedOrder:
    """One order of the documents.

    Attributes:
        name: ``original``, ``reverse`` or ``random``.
        documents: Indices of the documents in the request, in prompt order.
    """

    name: str
    documents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderSummary:
    """The answers over all orders.

    Attributes:
        flip_rate: Share of the orders other than the first whose answer is not that of the first.
        distinct: The different answers, in the order of their first occurrence.
        answers: For each order the index of its answer in ``distinct``.
    """

    flip_rate: float
    distinct: tuple[str, ...]
    answers: tuple[int, ...]


def orders_of(count: int, wanted: int, seed: int) -> list[EvaluatedOrder]:
    """Return different orders: the original one, the reverse one, and random permutations.

    Args:
        count: Number of documents, at least 2.
        wanted: Number of orders; fewer are returned if there are no more permutations.
    """
    original = tuple(range(count))
    found = [EvaluatedOrder("original", original), EvaluatedOrder("reverse", original[::-1])]
    seen = {one.documents for one in found}
    possible = math.factorial(count) if count < 10 else math.inf
    draw = random.Random(seed)
    while len(found) < min(wanted, possible):
        drawn = tuple(draw.sample(original, count))
        if drawn not in seen:
            seen.add(drawn)
            found.append(EvaluatedOrder("random", drawn))
    return found[:wanted]


def summarize(texts: Sequence[str]) -> OrderSummary:
    """Return how the answers differ. Answers that differ in white space alone are the same.

    Args:
        texts: The answer of each order, that of the original order first; at least two.
    """
    distinct: dict[str, int] = {}
    answers = tuple(distinct.setdefault(" ".join(text.split()), len(distinct)) for text in texts)
    flips = sum(answer != answers[0] for answer in answers[1:])
    return OrderSummary(flips / (len(answers) - 1), tuple(distinct), answers)
