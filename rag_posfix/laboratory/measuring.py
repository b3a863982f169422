"""Measures of a trained decoder on the splits of a task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rag_posfix.encodings.decoder import Decoder
from rag_posfix.laboratory.settings import generator_for
from rag_posfix.laboratory.tasks.base import IGNORED, Batch, Task

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
    def of(cls, found: dict[str, Any]) -> Measured:
        """Return the measure that ``dataclasses.asdict`` made a mapping of."""
        return cls(found["value"], found["token_error"], found["loss"], tuple(found["by_place"]))


@torch.inference_mode()
def measure(decoder: Decoder, task: Task, split: str, examples: int, device: torch.device) -> Measured:
    """Return the measure of a decoder on examples that are the same for every decoder.

    Args:
        decoder: The decoder; it is set to evaluate and back.
    """
    training = decoder.training
    decoder.eval()
    losses, wrong, tokens, places = [], [], [], []
    for batch in _batches(task, split, examples):
        found = _measure_batch(decoder, batch.to(device))
        losses.append(found[0])
        wrong.append(found[1])
        tokens.append(found[2])
        if batch.places is not None:
            places.append(batch.places)
    decoder.train(training)
    n_tokens, n_wrong, n_scored = torch.cat(losses).double(), torch.cat(wrong), torch.cat(tokens)
    loss = float(n_tokens.sum() / n_scored.sum())
    failed = (n_wrong > 0).double()
    value = math.exp(loss) if task.metric == "perplexity" else 100 * float(failed.mean())
    by_place = _by_place(failed, torch.cat(places)) if task.measured_by_place else ()
    return Measured(value, 100 * float(n_wrong.sum() / n_scored.sum()), loss, by_place)


def _batches(task: Task, split: str, examples: int) -> Iterator[Batch]:
    """Yield the examples of an evaluation, as many at a time as ``TOKENS_AT_ONCE`` holds."""
    generator = generator_for("evaluation", task.label, split)
    everything = task.batch(split, examples, generator)
    size = max(1, TOKENS_AT_ONCE // everything.ids.shape[1])
    for first in range(0, examples, size):
        rows = slice(first, first + size)
        places = None if everything.places is None else everything.places[rows]
        yield Batch(everything.ids[rows], everything.targets[rows], everything.scored[rows], places)


def _measure_batch(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the wrong tokens and the scored tokens of each example, (B,) each, on the CPU."""
    logits, _ = decoder(batch.ids)
    targets = torch.where(batch.scored, batch.targets, IGNORED)
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    wrong = (logits.argmax(dim=-1) != targets) & batch.scored
    counts = losses.view(targets.shape).sum(dim=1), wrong.sum(dim=1), batch.scored.sum(dim=1)
    return counts[0].cpu(), counts[1].cpu(), counts[2].cpu()


def _by_place(failed: Tensor, places: Tensor) -> tuple[float, ...]:
    """Return the error of the examples of each place in percent; of a place without examples the mean of all."""
    mean = float(failed.mean())
    groups = [failed[places == place] for place in range(int(places.max()) + 1)]
    return tuple(100 * (float(group.mean()) if group.numel() else mean) for group in groups)
