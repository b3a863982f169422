"""Held-out samples: how well a model finds their answers, by the place of the gold passages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rag_posfix.evaluation.statistics import mean
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.training.data.sample import Sample
from rag_posfix.training.forward import answer_logits, answer_loss
from rag_posfix.training.objectives import Objective, place_at
from rag_posfix.training.prompts import PromptMaker
from rag_posfix.training.tuned_model import TunedModel

Curves = dict[str, tuple[float, ...]]
"""Method -> mean log-probability per token of the answer at each place."""


def shares(places: int) -> tuple[float, ...]:
    """Return so many places from the first (0) to the last (1); a single one is the first."""
    return tuple(place / max(1, places - 1) for place in range(places))


def measure_places(
    model: TunedModel, prompts: PromptMaker, objective: Objective, samples: Sequence[Sample], places: int
) -> Curves:
    """Return the mean log-probability per token of the answers at each place, for each method of the objective.

    A method whose answers do not depend on the order is measured at one place.

    Cost: one forward pass per sample, place and method.
    """
    found = {}
    model.loaded.model.eval()
    with torch.no_grad(), model.computing():
        for method in objective.methods:
            at = shares(1 if method.is_order_invariant else places)
            found[method.name] = tuple(
                mean([_score(model, prompts, method, one, at_share) for one in samples]) for at_share in at
            )
    return found


def _score(model: TunedModel, prompts: PromptMaker, method: Mitigation, sample: Sample, share: float) -> float:
    prompt = prompts.make(sample.moved(place_at(sample, share)))
    plan = method.checked_plan(prompt.layout, model.loaded.spec.shape)
    return -float(answer_loss(answer_logits(model.loaded, prompt.layout, plan, prompt.answer), prompt.answer))


def worst_of(curves: Curves) -> float:
    """Return the lowest value of all methods and places."""
    return min(value for curve in curves.values() for value in curve)


def best_share(curves: Curves) -> float:
    """Return the place with the highest value of the first method, 0 (first) to 1 (last)."""
    curve = next(iter(curves.values()))
    at = max(range(len(curve)), key=lambda place: curve[place])
    return shares(len(curve))[at]
