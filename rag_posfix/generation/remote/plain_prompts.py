"""Methods on a server: those whose rows are plain prompts. Several rows vote on the answer."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch

from rag_posfix.contracts.request import MitigationChoice, MitigationInfo
from rag_posfix.errors import UnsupportedModelError
from rag_posfix.mitigations import Mitigation, create
from rag_posfix.plan.layout import Layout, Span
from rag_posfix.plan.plan import Capability, ModelShape, Plan, RowScores

_ON_SERVER = dict.fromkeys(Capability, "its weights are on a server")
SERVER_SHAPE = ModelShape(1, 1, 1, 1, 1, 1 << 31, frozenset(), _ON_SERVER)
"""What a method may know of a model on a server: nothing in it can be changed, and its sizes are not known."""

NEAREST = (
    "set mitigation='none' (--mitigation none, RAG_POSFIX_MITIGATION=none) with the reranker yes_no:top_n=5 and "
    "order='reverse': the model judges each passage in a request of its own and reads the best five in an order that "
    "follows from their scores, so that the order they are given in does not matter"
)
"""The arrangement that runs on every server."""


def _trial_layout(n_passages: int = 3) -> Layout:
    """Return a prompt of one token per segment, on which a method shows what its rows are."""
    spans = tuple(Span(index + 1, index + 2) for index in range(n_passages))
    suffix = Span(n_passages + 1, n_passages + 2)
    return Layout(
        token_ids=tuple(range(n_passages + 2)), prefix=Span(0, 1), passages=spans, texts=spans, suffix=suffix,
        question=suffix, keys=tuple(map(str, range(n_passages))),
        relevance=tuple(1 / (index + 1) for index in range(n_passages)),
    )  # fmt: skip


def remote_refusal(method: Mitigation) -> str | None:
    """Return why a method cannot run on a server, or None if it can. Nothing is sent.

    It can if its plan reads plain prompts: one, or several whose answers may vote (``Mitigation.rows_may_vote``).
    """
    reason = method.refusal(SERVER_SHAPE)
    if reason is not None:
        return reason
    plan = method.plan(_trial_layout(), SERVER_SHAPE)
    if not plan.reads_plain_prompts:
        return f"{method.name} changes how the model reads, and its weights are on a server"
    if len(plan.rows) > 1 and not method.rows_may_vote:
        return f"{method.name} pools the probabilities of {len(plan.rows)} prompts at every token, inside the engine"
    return None


def check_remote_mitigation(model_id: str, choice: MitigationChoice) -> MitigationInfo:
    """Return what caching needs to know of a mitigation of a remote generator; errors as those of ``create``.

    Raises:
        UnsupportedModelError: it needs the weights in this process; the message names an arrangement that runs.
    """
    method = create(choice.name, choice.parameters)
    reason = remote_refusal(method)
    if reason is not None:
        raise UnsupportedModelError(
            f"{model_id} is a remote generator, and mitigation={choice.name!r} needs the weights in this process: "
            f"{reason}; {NEAREST}"
        )
    return MitigationInfo(method.name, method.fingerprint(), method.is_order_invariant)


def plain_prompts(layout: Layout, choice: MitigationChoice) -> tuple[list[Layout], list[float]]:
    """Return the prompts of a checked mitigation's rows, and the weight of each row before any answer is known."""
    plan = create(choice.name, choice.parameters).plan(layout, SERVER_SHAPE)
    layout = plan.layout or layout
    prompts = [layout if row.passages is None else layout.select(row.passages) for row in plan.rows]
    return prompts, _prior_weights(plan)


def _prior_weights(plan: Plan) -> list[float]:
    rows = len(plan.rows)
    if plan.combine is None:
        return [1.0] * rows
    none = torch.zeros(rows)
    _, weights = plan.combine(RowScores(torch.zeros(rows, 1), none, none, none))
    return [float(weight) for weight in weights]


def most_agreed(answers: Sequence[str], weights: Sequence[float]) -> int:
    """Return the index of the answer that agrees most with all; of equal ones the first.

    With short answers this is the majority, with long ones the answer that has most words in common with the others:
    universal self-consistency, Chen et al. (2023), https://arxiv.org/abs/2311.17311, with word overlap as the judge.

    Formula: argmax_k sum_j weight_j F1(words of answer k, words of answer j).
    """
    words = [Counter(re.findall(r"\w+", answer.casefold())) for answer in answers]
    support = [
        math.fsum(weight * _overlap(own, other) for weight, other in zip(weights, words, strict=True)) for own in words
    ]
    return max(range(len(answers)), key=lambda index: (round(support[index], 9), -index))


def _overlap(own: Counter[str], other: Counter[str]) -> float:
    total = own.total() + other.total()
    return 1.0 if own == other else 2 * (own & other).total() / total
