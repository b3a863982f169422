"""How a decoder of the laboratory is sized and trained."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Annotated, Any, Literal

import torch

from rag_posfix.encodings.base import DecoderShape
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


def digest_of(*parts: Any) -> str:
    """Return a digest of values that JSON can hold."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def generator_for(*parts: Any) -> torch.Generator:
    """Return a generator that these values seed: nothing that was drawn before matters, so a run can be resumed."""
    return torch.Generator().manual_seed(int(digest_of(*parts), 16) >> 1)
