"""Rules that weigh passages by the answers that they wrote, and what a rule is worth. Used by ``expert_choice``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Rule = Callable[[Row], Tensor]


def own(row: Row) -> Tensor:
    """Return the log-probability of each passage's answer in its own row, (N,)."""
    result: Tensor = row["said"].diagonal()[:-1]
    return result


def lift(row: Row) -> Tensor:
    """Return how much each passage raised the log-probability of its answer, (N,)."""
    result: Tensor = own(row) - row["said"][:-1, -1]
    return result


def share(row: Row) -> Tensor:
    """Return the log of p_k(answer k) / sum_j p_j(answer k), (N,)."""
    result: Tensor = own(row) - row["said"][:-1].logsumexp(dim=1)
    return result


def mixed(row: Row) -> Tensor:
    """Return the log-probability of each passage's answer under the mixture weighted by the question, (N,)."""
    result: Tensor = (row["said"][:-1, :-1] + (5 * row["question"]).log_softmax(dim=0)).logsumexp(dim=1)
    return result


RELEVANCES: dict[str, Rule] = {
    "question": lambda row: row["question"],
    "given": lambda row: row["given"],
    "both": lambda row: row["question"] + row["given"],
}
ANSWERS: dict[str, Rule] = {
    "": lambda row: torch.zeros_like(row["given"]),
    " + share / 2": lambda row: share(row) / 2,
    " + share": share,
    " + 2 share": lambda row: 2 * share(row),
    " + log-probability per token": lambda row: own(row) / row["length"],
    " + log-probability": own,
    " + lift per token": lambda row: lift(row) / row["length"],
    " + lift": lift,
}
RULES: dict[str, Rule] = {
    f"{weight:g} {name}{extra}": lambda row, r=relevance, a=answer, w=weight: w * r(row) + a(row)  # type: ignore[misc]
    for weight in (2.5, 5.0, 10.0)
    for name, relevance in RELEVANCES.items()
    for extra, answer in ANSWERS.items()
}
RULES |= {
    "lift": lift,
    "lift per token": lambda row: lift(row) / row["length"],
    "likeliest answer of the mixture": mixed,
    "likeliest answer of the mixture, per token": lambda row: mixed(row) / row["length"],
}


def judge(rows: Sequence[Row], rule: Rule) -> dict[str, float]:
    """Return what a rule is worth: equal answers add their weights, the best passage of the best answer speaks."""
    found = []
    for row in rows:
        scores = rule(row).masked_fill(torch.tensor([not a for a in row["answers"][:-1]]), -1e9)
        weights = scores.log_softmax(dim=0)
        same = row["same"][:-1, :-1]
        together = weights.expand(len(scores), -1).masked_fill(~same, -1e9).logsumexp(dim=1)
        speaker = int(weights.masked_fill(~same[int(together.argmax())], -1e9).argmax())
        mixture = float((weights + row["gold"]).logsumexp(dim=0))
        found.append(
            (row["right"][speaker], speaker == row["gold_row"], row["gold"][speaker] / row["gold_tokens"],
             mixture / row["gold_tokens"])
        )  # fmt: skip
    names = ("accuracy_chosen", "believes_gold", "log_probability_chosen", "log_probability_mixture")
    return {
        n: sum(float(v) for v in column) / len(rows) for n, column in zip(names, zip(*found, strict=True), strict=True)
    }
