"""Objectives: what is trained on a sample. Each yields losses, whose gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rag_posfix.errors import ConfigError
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.plan.layout import Layout
from rag_posfix.plan.model_shape import ModelShape
from rag_posfix.plan.plan import Plan
from rag_posfix.training.data.sample import Sample
from rag_posfix.training.forward import answer_logits, answer_loss, distillation_loss
from rag_posfix.training.prompts import PromptMaker
from rag_posfix.training.tuned_model import TunedModel

__all__ = ["Block", "Distill", "InformationIntensive", "Objective", "place_at"]


class Objective(Protocol):
    """What is trained on a sample."""

    name: ClassVar[str]
    needs_teacher: ClassVar[bool]

    @property
    def methods(self) -> Sequence[Mitigation]:
        """The methods whose plans the model is trained under, and evaluated under."""

    def losses(
        self, model: TunedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Tensor]:
        """Yield the losses of a sample; each is a scalar whose graph may be freed before the next is asked for.

        Args:
            model: The model.
            prompts: Makes prompts for it.
            sample: The sample.
            random: The generator of this sample in this step.
            best_place: Where the untrained model reads best, 0 (first) to 1 (last).
        """


@dataclass(frozen=True)
class InformationIntensive:
    """Train answers that depend on short segments at uniform places (IN2).

    Source: An et al. (2024), Make Your LLM Fully Utilize the Context, section 3, https://arxiv.org/abs/2404.16811

    Args:
        method: The model is trained under its plan.
    """

    name: ClassVar[str] = "in2"
    needs_teacher: ClassVar[bool] = False

    method: Mitigation

    @property
    def methods(self) -> Sequence[Mitigation]:
        """The one method."""
        return (self.method,)

    def losses(
        self, model: TunedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Tensor]:
        """Yield the cross-entropy of the answer with the passages in the order of the sample."""
        prompt = prompts.make(sample)
        yield answer_loss(_logits(model, prompt.layout, self.method, prompt.answer), prompt.answer)


@dataclass(frozen=True)
class Block:
    """Train every sample under two masks: independent passages with a final block, and the full causal mask.

    Source: Ma et al. (2024), Block-Attention for Efficient Prefilling, section 3, https://arxiv.org/abs/2409.15355
    Differs from the paper: positions of the passages are those of ``method``, so that what is trained is what
        inference runs and what the passage KV store keeps; the paper's passages have consecutive positions.

    Args:
        full: The method of the full causal mask.
        method: A method with independent passages.
    """

    name: ClassVar[str] = "block"
    needs_teacher: ClassVar[bool] = False

    full: Mitigation
    method: Mitigation

    @property
    def methods(self) -> Sequence[Mitigation]:
        """Both methods."""
        return (self.full, self.method)

    def losses(
        self, model: TunedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Tensor]:
        """Yield half of the cross-entropy of the answer under each mask."""
        prompt = prompts.make(sample)
        for method in self.methods:
            plan = _plan(method, prompt.layout, model.loaded.spec.shape)
            if method is self.method and not plan.independent_passages:
                raise ConfigError(
                    f"--mitigation {method.name} does not read passages independently of each other; use "
                    "parallel_windows, set_prompting or parallel_encoding"
                )
            yield answer_loss(answer_logits(model.loaded, prompt.layout, plan, prompt.answer), prompt.answer) / 2


@dataclass(frozen=True)
class Distill:
    """Let the model say with the gold passage anywhere what it said, untrained, with it at its best place.

    Source: Pos2Distill (2025), section 3 (retrieval), https://arxiv.org/abs/2508.15709
    Formula: KL(teacher at the best place || student elsewhere) + anchor KL(teacher || student at the best place).
    Differs from the paper: the best place is measured instead of the first; one drawn place per sample and step
        instead of a weighted sum over places.

    Args:
        method: Teacher and student read under its plan.
        anchor: Weight of the second term.
        temperature: Divisor of the logits.
    """

    name: ClassVar[str] = "distill"
    needs_teacher: ClassVar[bool] = True

    method: Mitigation
    anchor: float = 1.0
    temperature: float = 1.0

    @property
    def methods(self) -> Sequence[Mitigation]:
        """The one method."""
        return (self.method,)

    def losses(
        self, model: TunedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Tensor]:
        """Yield the divergence at a drawn place, then the weighted one at the best place."""
        best = place_at(sample, best_place)
        places = [place for place in range(len(sample.passages) - len(sample.gold) + 1) if place != best]
        prompt = prompts.make(sample.moved(best))
        with model.untrained() as teacher:
            plan = _plan(self.method, prompt.layout, teacher.spec.shape)
            said = answer_logits(teacher, prompt.layout, plan, prompt.answer)
        if places:
            elsewhere = prompts.make(sample.moved(random.choice(places)))
            student = _logits(model, elsewhere.layout, self.method, elsewhere.answer)
            yield distillation_loss(student, said, self.temperature)
        if self.anchor:
            student = _logits(model, prompt.layout, self.method, prompt.answer)
            yield self.anchor * distillation_loss(student, said, self.temperature)


def place_at(sample: Sample, share: float) -> int:
    """Return the place of the gold passages at a share of their range: 0 is the first, 1 the last."""
    return round(share * (len(sample.passages) - len(sample.gold)))


def _plan(method: Mitigation, layout: Layout, shape: ModelShape) -> Plan:
    return method.checked_plan(layout, shape)


def _logits(model: TunedModel, layout: Layout, method: Mitigation, answer: tuple[int, ...]) -> Tensor:
    with torch.enable_grad():
        return answer_logits(model.loaded, layout, _plan(method, layout, model.loaded.spec.shape), answer)
