"""Terms of a loss: what the model reads, and what it should say. Their gradients are accumulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_posfix.generation.model.one_pass import AnsweredPrompt
from rag_posfix.training.forward import answer_loss, distillation_loss
from rag_posfix.training.packing import read_packed
from rag_posfix.training.tuned_model import TunedModel


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A term of the loss of a sample.

    Attributes:
        read: What the model reads.
        taught: What the untrained model reads; the model should say the same. None: it should say the answer.
        weight: What the loss is multiplied by.
        temperature: Divisor of the logits of both, with ``taught``.
    """

    read: AnsweredPrompt
    taught: AnsweredPrompt | None = None
    weight: float = 1.0
    temperature: float = 1.0

    def loss(self, logits: Tensor, said: Tensor | None = None) -> Tensor:
        """Return the weighted loss.

        Args:
            logits: What the model says, (len(answer), V).
            said: What the untrained model says, in the same shape, with ``taught``.
        """
        if said is None:
            return self.weight * answer_loss(logits, self.read.answer)
        return self.weight * distillation_loss(logits, said, self.temperature)


def add_gradients(model: TunedModel, terms: Sequence[Term], divisor: int, most_tokens: int) -> list[float]:
    """Add the gradients of the sum of terms, divided by ``divisor``, to the model; return each loss undivided.

    Args:
        terms: Terms that may be read in one pass; a prompt of the untrained model that several have is read once.
        most_tokens: Most tokens of a pass, as in ``packs``.

    Cost: the graph of one pass at a time, and the untrained model's logits of all terms.
    """
    losses = []
    with model.computing():
        said = _said(model, terms, most_tokens)
        for numbers, logits in read_packed(model.loaded, [one.read for one in terms], most_tokens):
            read = [terms[number] for number in numbers]
            found = [
                one.loss(own, None if one.taught is None else said[one.taught])
                for one, own in zip(read, logits, strict=True)
            ]
            torch.autograd.backward([loss / divisor for loss in found])
            losses += [float(loss.detach()) for loss in found]
    return losses


def _said(model: TunedModel, terms: Sequence[Term], most_tokens: int) -> dict[AnsweredPrompt, Tensor]:
    """Return the logits of the untrained model for each prompt that it reads."""
    taught = list(dict.fromkeys(one.taught for one in terms if one.taught is not None))
    if not taught:
        return {}
    said: dict[AnsweredPrompt, Tensor] = {}
    with model.untrained() as teacher:
        for numbers, logits in read_packed(teacher, taught, most_tokens):
            said |= {taught[number]: own for number, own in zip(numbers, logits, strict=True)}
    return said
