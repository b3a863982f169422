"""Known causes of position bias, the methods that correct them, and the share of a model's bias that each removes.

The position experiment on keys and values measures all methods on the same questions; nothing is trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from langchain_core.documents import Document
from torch import Tensor

from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.positions import PositionRow, answer_at_positions
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.claims.base import Claim, Condition, Evidence, draw_numbers
from rag_posfix.lab.probing.base import estimate
from rag_posfix.lab.probing.positional_dimensions import find_channels, mean_hidden_states
from rag_posfix.lab.probing.subject import Subject, key_value_pairs, language_model

METHODS = {
    "inter_document": "causal mask",
    "set_prompting": "causal mask and positions",
    "multi_base": "RoPE's distance decay",
    "head_scaling": "RoPE's distance decay",
    "hidden_scaling": "hidden channel",
    "stable_mask": "attention sink",
    "calibrated_attention": "bias of slots",
}
"""The cause that each method corrects."""

REMOVED, WORST, MEAN = "share of the spread removed", "worst position gains", "mean gains"


def number_name(method: str, number: str) -> str:
    """Return the name of a number of a method: its cause first."""
    return f"{METHODS[method]}, {method}: {number}"


class _EqualRelevance:
    """Scores all passages alike, so that no method learns from the scorer which passage has the answer."""

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        return [d.model_copy(update={"metadata": {**d.metadata, "relevance_score": 0.5}}) for d in documents]


def key_value_questions(count: int, pairs: int) -> list[PositionExample]:
    """Return questions for the value of a key, with a passage for each of ``pairs`` keys."""
    questions = []
    for number in range(count):
        (key, value), *_ = records = key_value_pairs(random.Random(number), pairs)
        gold, *others = (Document(f"The value of the key {k} is {v}.", id=k) for k, v in records)
        question = f"What is the value of the key {key}?"
        questions.append(PositionExample(str(number), question, (value,), (gold,), tuple(others)))
    return questions


def log_probabilities(rows: Sequence[PositionRow], condition: str) -> Tensor:
    """Return the log-probability of the answer by question and position of the gold passage.

    Shapes:
        returns: (questions, positions).

    Raises:
        EvaluationError: a log-probability is missing.
    """
    table: dict[str, list[float]] = {}
    for row in rows:
        if row.condition == condition:
            if row.log_probability is None:
                raise EvaluationError(f"{condition}: log_probability=None; use a model in this process")
            table.setdefault(row.question, []).append(row.log_probability)
    return torch.tensor(list(table.values()), dtype=torch.float64)


def compare_bias(method: Tensor, unmodified: Tensor) -> dict[str, dict[str, Any]]:
    """Return what a method changes in the bias of the unmodified model, with intervals; questions stay paired.

    Formula: with a_p and b_p the means at position p of the method and of the unmodified model:
        1 - (max a - min a) / (max b - min b); min a - min b; mean a - mean b.

    Shapes:
        method, unmodified: (questions, positions).
    """
    count = unmodified.shape[1]

    def spread(means: Tensor) -> Tensor:
        return means.amax(dim=-1) - means.amin(dim=-1)

    statistics: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        REMOVED: lambda a, b: 1 - spread(a) / spread(b),
        WORST: lambda a, b: a.amin(dim=-1) - b.amin(dim=-1),
        MEAN: lambda a, b: a.mean(dim=-1) - b.mean(dim=-1),
    }

    def of_both(statistic: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda means: statistic(means[..., :count], means[..., count:])

    both = torch.cat((method, unmodified), dim=1)
    return {name: estimate(both, of_both(statistic)) for name, statistic in statistics.items()}


def causes(
    subject: Subject, progress: Progress, *, questions: int, pairs: int, positions: int, strings: int, tokens: int
) -> Evidence:
    """Ask for the value of a key at several positions with each method, and compare the bias with none."""
    model = language_model(subject, "causes")
    with progress("random text, choosing the channel") as report:
        channel = find_channels(subject, mean_hidden_states(subject, strings, tokens, 0, report)[0], 1)[0].channel
    parameters: dict[str, dict[str, Any]] = {"hidden_scaling": {"channel": channel}}
    with progress("answering") as report:
        rows = answer_at_positions(
            model.engine, key_value_questions(questions, pairs),
            [MethodSpec(name, parameters.get(name, {})) for name in ("none", *METHODS)],
            gold_positions=torch.linspace(0, pairs - 1, positions).round().int().tolist(),
            n_documents=pairs, max_new_tokens=1, reranker=_EqualRelevance(), progress=report,
        )  # fmt: skip
    unmodified = log_probabilities(rows, "none")
    labels = {row.condition.partition(":")[0]: row.condition for row in rows}
    found = {name: compare_bias(log_probabilities(rows, labels[name]), unmodified) for name in METHODS}
    ordered = sorted(METHODS, key=lambda name: -found[name][WORST]["value"])
    numbers = {number_name(name, key): found[name][key] for key in (REMOVED, WORST, MEAN) for name in ordered}
    shares = {f"{METHODS[name]}: {name}": found[name][REMOVED] for name in ordered}
    return Evidence(numbers, partial(draw_numbers, shares, f"{questions} questions, {pairs} passages", REMOVED))


CAUSES = Claim(
    1, "causes", "A method that corrects a known cause of position bias removes a part of the bias.", causes,
    tuple(Condition(number_name(name, REMOVED), above=0) for name in METHODS),
    {"questions": 4, "pairs": 5, "positions": 3, "strings": 8, "tokens": 128},
    {"questions": 200, "pairs": 20, "positions": 5, "strings": 64, "tokens": 1000},
    see="The share of the spread over positions that each method removes, best worst position first: it follows.",
    beware="Order-invariant methods (inter_document, set_prompting) always remove all; read what the worst gains.",
)  # fmt: skip
