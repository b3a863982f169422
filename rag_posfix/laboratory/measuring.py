"""Settings of a training in the laboratory, and the errors of a decoder on a task."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.encodings.base import DecoderShape
from rag_posfix.encodings.decoder import Decoder
from rag_posfix.laboratory.tasks.base import IGNORED, Batch, Task
from rag_posfix.parameters import Integer, Number, check_parameters


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Sizes and training of a decoder.

    Attributes:
        steps: Most training steps.
        batch: Examples per step.
        learning_rate: Of Adam, after ``warmup`` steps; it then falls along half a cosine to a tenth.
        warmup: Steps in which the rate rises from 0.
        evaluate_every: Steps between two evaluations; a checkpoint follows each.
        examples: Examples of an evaluation, per split.
        patience: Evaluations after which training stops early: that many in a row without error, or, for perplexity,
            without a new best; 0 never stops early.
        layers: Layers of the decoder.
        heads: Attention heads of a layer.
        width: Channels of a hidden state.
        inner: Channels of the feed-forward part; 0 is four times ``width``.
        norm: "pre" or "post".
        dropout: Share of channels that are set to 0 in training.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: Annotated[int, Integer(1)] = 2000
    batch: Annotated[int, Integer(1)] = 32
    learning_rate: Annotated[float, Number(0, 1, above=True)] = 1e-3
    warmup: Annotated[int, Integer(0)] = 100
    evaluate_every: Annotated[int, Integer(1)] = 200
    examples: Annotated[int, Integer(1)] = 512
    patience: Annotated[int, Integer(0)] = 3
    layers: Annotated[int, Integer(1)] = 2
    heads: Annotated[int, Integer(1)] = 4
    width: Annotated[int, Integer(2)] = 64
    inner: Annotated[int, Integer(0)] = 0
    norm: Literal["pre", "post"] = "pre"
    dropout: Annotated[float, Number(0, 0.9)] = 0.0

    def __post_init__(self) -> None:
        check_parameters(self, "lab")

    def shape(self, vocabulary: int) -> DecoderShape:
        """Return the shape of the decoder for a task."""
        return DecoderShape(
            vocabulary, self.layers, self.heads, self.width, self.inner or 4 * self.width, self.norm, self.dropout
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def digest_of(*values: Any) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def generator_for(*values: Any) -> torch.Generator:
    """Return a generator that these values seed: nothing that was drawn before matters, so a run can be resumed."""
    return torch.Generator().manual_seed(int(digest_of(*values), 16) >> 1)


TOKENS_AT_ONCE = 1 << 13
"""Tokens of a forward pass of an evaluation, so that O(T^2) encodings stay within memory at longer contexts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measure of one split.

    Attributes:
        value: Error in percent, or perplexity, as the task's ``metric`` says.
        token_error: Share of scored tokens that are wrong, in percent.
        loss: Mean cross-entropy of the scored tokens, in nats.
        by_place: Error of the examples of each place, in tasks that measure by place.
    """

    value: float
    token_error: float
    loss: float
    by_place: tuple[float, ...] = ()

    @classmethod
    def of(cls, payload: dict[str, Any]) -> Measured:
        """Return the measure that ``dataclasses.asdict`` made a mapping of."""
        return cls(payload["value"], payload["token_error"], payload["loss"], tuple(payload["by_place"]))


@torch.inference_mode()
def measure(decoder: Decoder, task: Task, split: str, examples: int, device: torch.device) -> Measured:
    """Return the measure of a decoder on examples that are the same for every decoder.

    Args:
        decoder: The decoder; it is set to evaluate and back.
    """
    training = decoder.training
    decoder.eval()
    losses, wrong, tokens, positions = [], [], [], []
    for batch in _batches(task, split, examples):
        counts = _measure_batch(decoder, batch.to(device))
        losses.append(counts[0])
        wrong.append(counts[1])
        tokens.append(counts[2])
        if batch.places is not None:
            positions.append(batch.places)
    decoder.train(training)
    n_tokens, n_wrong, n_scored = torch.cat(losses).double(), torch.cat(wrong), torch.cat(tokens)
    loss = n_tokens.sum() / n_scored.sum()
    failed = (n_wrong > 0).double()
    # torch's exp of a loss of a decoder that diverged is infinite; that of math is an error
    value = float(loss.exp()) if task.metric == "perplexity" else 100 * float(failed.mean())
    by_place = _by_place(failed, torch.cat(positions)) if task.measured_by_place else ()
    return Measured(value, 100 * float(n_wrong.sum() / n_scored.sum()), float(loss), by_place)


def _batches(task: Task, split: str, examples: int) -> Iterator[Batch]:
    """Yield the examples of an evaluation, as many at a time as ``TOKENS_AT_ONCE`` holds."""
    generator = generator_for("evaluation", task.label, split)
    everything = task.batch(split, examples, generator)
    size = max(1, TOKENS_AT_ONCE // everything.ids.shape[1])
    for first in range(0, examples, size):
        rows = slice(first, first + size)
        positions = None if everything.places is None else everything.places[rows]
        yield Batch(everything.ids[rows], everything.targets[rows], everything.scored[rows], positions)


def _measure_batch(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the wrong tokens and the scored tokens of each example, (B,) each, on the CPU."""
    logits, _ = decoder(batch.ids)
    targets = torch.where(batch.scored, batch.targets, IGNORED)
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    wrong = (logits.argmax(dim=-1) != targets) & batch.scored
    counts = losses.view(targets.shape).sum(dim=1), wrong.sum(dim=1), batch.scored.sum(dim=1)
    return counts[0].cpu(), counts[1].cpu(), counts[2].cpu()


def _by_place(failed: Tensor, positions: Tensor) -> tuple[float, ...]:
    """Return the error of the examples of each place in percent; of a place without examples the mean of all."""
    mean = float(failed.mean())
    groups = [failed[positions == position] for position in range(int(positions.max()) + 1)]
    return tuple(100 * (float(group.mean()) if group.numel() else mean) for group in groups)
