"""Known causes of position bias, the methods that correct them, and the share of a model's bias that each removes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rag_posfix.evaluation.answers.causes import (
    CAUSES,
    MEAN,
    REMOVED,
    WORST,
    compare_causes,
    correcting_methods,
)
from rag_posfix.evaluation.data.questions import key_value_questions
from rag_posfix.evaluation.figures import draw_numbers
from rag_posfix.evaluation.record import Progress
from rag_posfix.lab.claims.base import Claim, Condition, Evidence
from rag_posfix.lab.probing.positional_dimensions import find_channels, mean_hidden_states
from rag_posfix.lab.probing.subject import Subject, language_model


def number_name(method: str, number: str) -> str:
    """Return the name of a number of a method: its cause first."""
    return f"{CAUSES[method]}, {method}: {number}"


def causes(
    subject: Subject, progress: Progress, *, questions: int, pairs: int, positions: int, strings: int, tokens: int
) -> Evidence:
    """Ask for the value of a key at several positions with each method, and compare the bias with none."""
    model = language_model(subject, "causes")
    with progress("random text, choosing the channel") as report:
        channel = find_channels(subject, mean_hidden_states(subject, strings, tokens, 0, report)[0], 1)[0].channel
    with progress("answering") as report:
        found = compare_causes(
            model.engine, key_value_questions(questions, pairs),
            correcting_methods({"hidden_scaling": {"channel": channel}}), documents=pairs, progress=report,
            gold_positions=torch.linspace(0, pairs - 1, positions).round().int().tolist(),
        )  # fmt: skip
    methods: dict[str, Any] = {entry["name"]: entry for entry in found["methods"].values()}
    ordered = sorted(methods, key=lambda name: -methods[name][WORST]["value"])
    numbers = {number_name(name, key): methods[name][key] for key in (REMOVED, WORST, MEAN) for name in ordered}
    numbers["spread over positions, unmodified"] = found["spread"]
    shares = {f"{CAUSES[name]}: {name}": methods[name][REMOVED] for name in ordered}
    return Evidence(
        numbers, partial(draw_numbers, shares, f"{questions} questions, {pairs} passages", REMOVED, "symlog")
    )


CAUSES_CLAIM = Claim(
    1, "causes", "A method that corrects a known cause of position bias removes a part of the bias.", causes,
    tuple(Condition(number_name(name, REMOVED), above=0) for name in CAUSES),
    {"questions": 4, "pairs": 5, "positions": 3, "strings": 8, "tokens": 128},
    {"questions": 200, "pairs": 20, "positions": 5, "strings": 64, "tokens": 1000},
    see="The share of the spread over positions that each method removes, best worst position first: it follows.",
    beware="Order-invariant methods (inter_document, set_prompting) always remove all; read what the worst gains.",
)  # fmt: skip
