"""Objectives of training and the terms of their losses.

What a model forgot in training: the perplexity of texts that have nothing to do with it, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, model_facts, silent
from rag_posfix.evaluation.statistics import difference_interval, mean
from rag_posfix.generation.engine import Engine
from rag_posfix.generation.model.one_pass import AnsweredPrompt, forward_with_answers
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.lab.training.data.make_data import Sample
from rag_posfix.lab.training.prompts import (
    PromptMaker,
    TrainingPrompt,
    answer_loss,
    answered_prompt,
    distillation_loss,
    read_packed,
)
from rag_posfix.lab.training.tuned_model import TunedModel
from rag_posfix.mitigations.base import Mitigation
from rag_posfix.patching.attention_hook import Overrides
from rag_posfix.text import content_hash


@dataclass(frozen=True, slots=True, eq=False)
class LossTerm:
    """A term of the loss of a sample.

    Attributes:
        prompt: Read by the model.
        teacher_prompt: Read by the untrained model, whose logits are the target. None: the answer is the target.
        weight: What the loss is multiplied by.
        temperature: Divisor of the logits of both, with ``teacher_prompt``.
    """

    prompt: AnsweredPrompt
    teacher_prompt: AnsweredPrompt | None = None
    weight: float = 1.0
    temperature: float = 1.0

    def loss(self, logits: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
        """Return the weighted loss.

        Args:
            logits: Of the model, (len(answer), V).
            teacher_logits: Of the untrained model, in the same shape, with ``teacher_prompt``.
        """
        if teacher_logits is None:
            return self.weight * answer_loss(logits, self.prompt.answer)
        return self.weight * distillation_loss(logits, teacher_logits, self.temperature)


def add_gradients(model: TunedModel, terms: Sequence[LossTerm], divisor: int, most_tokens: int) -> list[float]:
    """Add the gradients of the sum of terms, divided by ``divisor``, to the model; return each loss undivided.

    Args:
        terms: Terms that may be read in one pass; a prompt of the untrained model that several have is read once.
        most_tokens: Most tokens of a pass, as in ``packs``.

    Cost: the graph of one pass at a time, and the untrained model's logits of all terms.
    """
    losses = []
    with model.computing():
        teacher_logits = _untrained_logits(model, terms, most_tokens)
        for numbers, logits in read_packed(model.loaded, [term.prompt for term in terms], most_tokens):
            pass_terms = [terms[number] for number in numbers]
            term_losses = [
                term.loss(term_logits, None if term.teacher_prompt is None else teacher_logits[term.teacher_prompt])
                for term, term_logits in zip(pass_terms, logits, strict=True)
            ]
            torch.autograd.backward([loss / divisor for loss in term_losses])
            losses += [float(loss.detach()) for loss in term_losses]
    return losses


def _untrained_logits(model: TunedModel, terms: Sequence[LossTerm], most_tokens: int) -> dict[AnsweredPrompt, Tensor]:
    """Return the logits of the untrained model for each prompt that it reads."""
    prompts = list(dict.fromkeys(term.teacher_prompt for term in terms if term.teacher_prompt is not None))
    if not prompts:
        return {}
    teacher_logits: dict[AnsweredPrompt, Tensor] = {}
    with model.untrained() as teacher:
        for numbers, logits in read_packed(teacher, prompts, most_tokens):
            teacher_logits |= {
                prompts[number]: prompt_logits for number, prompt_logits in zip(numbers, logits, strict=True)
            }
    return teacher_logits


class Objective(Protocol):
    """What is trained on a sample."""

    name: ClassVar[str]
    needs_teacher: ClassVar[bool]

    @property
    def methods(self) -> Sequence[Mitigation]:
        """The methods that the model is trained and evaluated with."""

    def terms(
        self, loaded: LoadedModel, prompts: PromptMaker, sample: Sample, random: Random, best_place: float
    ) -> Iterator[LossTerm]:
        """Yield the terms of the loss of a sample.

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
    ) -> Iterator[LossTerm]:
        """Yield the cross-entropy of the answer with the passages in the order of the sample."""
        yield LossTerm(_read(loaded, self.method, prompts.make(sample)))


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
    ) -> Iterator[LossTerm]:
        """Yield half of the cross-entropy of the answer under each mask."""
        prompt = prompts.make(sample)
        for method in self.methods:
            plan = method.checked_plan(prompt.layout, loaded.spec.shape)
            if method is self.method and not plan.independent_passages:
                raise ConfigError(
                    f"--mitigation {method.name} does not read passages independently of each other; use "
                    "parallel_windows, set_prompting or parallel_encoding"
                )
            yield LossTerm(answered_prompt(loaded, prompt.layout, plan, prompt.answer), weight=0.5)


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
    ) -> Iterator[LossTerm]:
        """Yield the divergence at a drawn place, then the weighted one at the best place."""
        best = place_at(sample, best_place)
        positions = [position for position in range(len(sample.passages) - len(sample.gold) + 1) if position != best]
        at_best = _read(loaded, self.method, prompts.make(sample.move_gold(best)))
        if positions:
            elsewhere = _read(loaded, self.method, prompts.make(sample.move_gold(random.choice(positions))))
            yield LossTerm(elsewhere, at_best, temperature=self.temperature)
        if self.anchor:
            yield LossTerm(at_best, at_best, self.anchor, self.temperature)


def place_at(sample: Sample, share: float) -> int:
    """Return the place of the gold passages at a share of their range: 0 is the first, 1 the last."""
    return round(share * (len(sample.passages) - len(sample.gold)))


def _read(loaded: LoadedModel, method: Mitigation, prompt: TrainingPrompt) -> AnsweredPrompt:
    return answered_prompt(
        loaded, prompt.layout, method.checked_plan(prompt.layout, loaded.spec.shape), prompt.answer
    )  # fmt: skip


BASE = "base"
"""Name of the model before training."""


def text_losses(engine: Engine, texts: Sequence[str], tokens: int, progress: Progress = silent) -> list[list[float]]:
    """Return -log p of each token of each text in nats; without that of the first, if no token begins a text.

    The unmodified model reads each text alone, without a chat template, after the token that begins its texts (Gemma).

    Args:
        tokens: Tokens of each that are read; the rest is left out.

    Cost: one forward pass per text.
    """
    losses = []
    begin = engine.encoder.encode_prompt("")
    begin = begin if len(begin) == 1 else []  # not the tokens that others put around a text
    with progress("reading texts") as report, torch.no_grad():
        for number, text in enumerate(texts):
            token_ids = [*begin, *engine.encoder.encode_text(text)[:tokens]]
            if len(token_ids) > 1:
                prompt = AnsweredPrompt(token_ids[:1], torch.zeros((1, 1)), Overrides(), token_ids[1:])
                [logits] = forward_with_answers(engine.loaded, [prompt])
                targets = torch.tensor(token_ids[1:], device=logits.device)
                losses.append(cross_entropy(logits.float(), targets, reduction="none").tolist())
            report(number + 1, len(texts))
    return losses


def compare_perplexity(
    engines: Mapping[str, Engine], texts: Sequence[str], tokens: int, out: Path | None, progress: Progress = silent
) -> ExperimentRecord:
    """Return the perplexity of texts under a model and under the models trained from it.

    Formula: exp(sum of -log p / number of tokens), over all texts. The difference is the mean over texts of the
        log-probability per token less the value of the base; its interval is a 95 % bootstrap interval over texts.

    Args:
        engines: ``base`` and the trained models, by name.
        tokens: As in ``text_losses``.
    """
    losses = {name: text_losses(engine, texts, tokens, progress) for name, engine in engines.items()}
    if not losses[BASE]:
        raise ConfigError("no text has two tokens; give longer --texts")
    rows = [
        {"model": name, "text": number, "tokens": len(token_losses), "log_probability": -mean(token_losses)}
        for name, per_text in losses.items()
        for number, token_losses in enumerate(per_text)
    ]
    head = {
        "kind": "perplexity", **environment(), **model_facts(engines[BASE]),
        "settings": {"tokens": tokens, "texts": len(texts), "digest": content_hash(*texts)},
        "summary": {name: _compare(model_losses, losses[BASE]) for name, model_losses in losses.items()},
    }  # fmt: skip
    return ExperimentRecord(head, rows).write(out)


def _compare(losses: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, Any]:
    values = [loss for text in losses for loss in text]
    differences = [mean(before) - mean(after) for after, before in zip(losses, base, strict=True)]
    return {
        # torch's exp of the loss of a model that diverged is infinite; that of math is an error
        "perplexity": float(torch.tensor(mean(values), dtype=torch.float64).exp()),
        "texts": len(losses),
        "tokens": len(values),
        "difference": mean(differences),
        "difference_ci95": list(difference_interval(differences)),
    }
