"""Objectives: what is trained on a sample. Each yields the terms of a loss; it runs no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.one_pass import AnsweredPrompt
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.training.data.sample import Sample
from rag_posfix.training.forward import answered_prompt
from rag_posfix.training.prompts import PromptMaker, TrainingPrompt
from rag_posfix.training.terms import Term


class Objective(Protocol):
    """What is trained on a sample."""

    name: ClassVar[str]
    needs_teacher: ClassVar[bool]

    @property
    def methods(self) -> Sequence[Mitigation]:
        """The methods whose plans the model is trained under, and evaluated under."""

    def terms(
        self, loaded: LoadedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Term]:
        """Yield the terms whose sum is the loss of a sample.

        Args:
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

    def terms(
        self, loaded: LoadedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Term]:
        """Yield the cross-entropy of the answer with the passages in the order of the sample."""
        yield Term(_read(loaded, self.method, prompts.make(sample)))


@dataclass(frozen=True)
class Block:
    """Train every sample under two masks: independent passages with a final block, and the full causal mask.

    Source: Ma et al. (2024), Block-Attention for Efficient Prefilling, section 3, https://arxiv.org/abs/2409.15355
    Differs from the paper: positions of the passages are those of ``method``, so that what is trained is what
        inference runs and what the passage KV store keeps; the paper's passages have consecutive positions.

    Args:
        full: The method of the full causal mask.
    """

    name: ClassVar[str] = "block"
    needs_teacher: ClassVar[bool] = False

    full: Mitigation
    method: Mitigation

    @property
    def methods(self) -> Sequence[Mitigation]:
        """Both methods."""
        return (self.full, self.method)

    def terms(
        self, loaded: LoadedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Term]:
        """Yield half of the cross-entropy of the answer under each mask."""
        prompt = prompts.make(sample)
        for method in self.methods:
            plan = method.checked_plan(prompt.layout, loaded.spec.shape)
            if method is self.method and not plan.independent_passages:
                raise ConfigError(
                    f"--mitigation {method.name} does not read passages independently of each other; use "
                    "parallel_windows, set_prompting or parallel_encoding"
                )
            yield Term(answered_prompt(loaded, prompt.layout, plan, prompt.answer), weight=0.5)


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

    def terms(
        self, loaded: LoadedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[Term]:
        """Yield the divergence at a drawn place, then the weighted one at the best place."""
        best = place_at(sample, best_place)
        places = [place for place in range(len(sample.passages) - len(sample.gold) + 1) if place != best]
        at_best = _read(loaded, self.method, prompts.make(sample.moved(best)))
        if places:
            elsewhere = _read(loaded, self.method, prompts.make(sample.moved(random.choice(places))))
            yield Term(elsewhere, at_best, temperature=self.temperature)
        if self.anchor:
            yield Term(at_best, at_best, self.anchor, self.temperature)


def place_at(sample: Sample, share: float) -> int:
    """Return the place of the gold passages at a share of their range: 0 is the first, 1 the last."""
    return round(share * (len(sample.passages) - len(sample.gold)))


def _read(loaded: LoadedModel, method: Mitigation, prompt: TrainingPrompt) -> AnsweredPrompt:
    return answered_prompt(
        loaded, prompt.layout, method.checked_plan(prompt.layout, loaded.spec.shape), prompt.answer
    )  # fmt: skip
