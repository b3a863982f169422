"""How a model is fine-tuned.

How training data is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Annotated, Any, Literal

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Integer, Number, check_parameters


@dataclasses.dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a model is fine-tuned.

    Attributes:
        steps: Most steps of the optimizer.
        batch: Samples per step; their gradients are accumulated.
        packing: Pack prompts into passes of at most N tokens; 0: off.
        learning_rate: Rate of AdamW after the warmup; falls to a tenth.
        warmup: Steps in which the rate rises from 0.
        weight_decay: Of AdamW.
        rank: Rank of the LoRA matrices; 0 trains all weights.
        alpha: Scale of LoRA: its product is multiplied by alpha / rank.
        targets: Add LoRA to ``all-linear``, or to names with commas.
        dtype: Compute with this dtype.
        checkpointing: Layers are computed again for the gradient instead of kept.
        evaluate_every: Steps between two evaluations; a checkpoint follows each.
        held_out: Evaluate on this many samples at the end of the file.
        places: Evaluate this many gold positions, first to last.
        patience: Stop after N evaluations without progress; 0: never.
        seed: Seed of sample order, LoRA start and distill positions.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: Annotated[int, Integer(1)] = 200
    batch: Annotated[int, Integer(1)] = 8
    packing: Annotated[int, Integer(0)] = 0
    learning_rate: Annotated[float, Number(0, 1, exclusive_min=True)] = 1e-4
    warmup: Annotated[int, Integer(0)] = 10
    weight_decay: Annotated[float, Number(0, 1)] = 0.0
    rank: Annotated[int, Integer(0)] = 16
    alpha: Annotated[float, Number(0, 1024, exclusive_min=True)] = 32.0
    targets: str = "all-linear"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    checkpointing: bool = False
    evaluate_every: Annotated[int, Integer(1)] = 50
    held_out: Annotated[int, Integer(1)] = 16
    places: Annotated[int, Integer(2)] = 3
    patience: Annotated[int, Integer(0)] = 3
    seed: Annotated[int, Integer(0)] = 0

    def __post_init__(self) -> None:
        check_parameters(self, "train")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    def digest(self, **more: Any) -> str:
        """Return a digest of the settings and of whatever else decides the run."""
        content = json.dumps([dataclasses.asdict(self), more], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class DataSettings:
    """How training data is made.

    Attributes:
        samples: Number of samples.
        min_tokens: Fewest tokens of the segments of a sample together.
        max_tokens: About the most tokens of the segments of a sample together.
        length_bins: Parts of that range that get equally many samples.
        segment_words: Maximum number of words of a segment.
        multi: Share of samples whose answer needs several segments.
        own_distractors: Use a pair's own distractors first.
        n_gram: Reject samples that share this many words with evaluation.
        seed: Seed of everything that is drawn.

    Raises:
        ConfigError: a value is out of range.
    """

    samples: Annotated[int, Integer(1)] = 1000
    min_tokens: Annotated[int, Integer(1)] = 512
    max_tokens: Annotated[int, Integer(1)] = 1536
    length_bins: Annotated[int, Integer(1)] = 4
    segment_words: Annotated[int, Integer(10)] = 100
    multi: Annotated[float, Number(0, 1)] = 0.2
    own_distractors: bool = False
    n_gram: Annotated[int, Integer(3)] = 10
    seed: Annotated[int, Integer(0)] = 0

    def __post_init__(self) -> None:
        check_parameters(self, "train data")
        if self.max_tokens < self.min_tokens:
            raise ConfigError(f"max_tokens={self.max_tokens} must be >= min_tokens={self.min_tokens}")

    def length_bin(self, index: int) -> int:
        """Return which part of the range of lengths the sample ``index`` of its source is in."""
        return index % self.length_bins

    def bounds(self, length_bin: int) -> tuple[int, int]:
        """Return the fewest and the most tokens of a part of the range."""
        width = (self.max_tokens - self.min_tokens) / self.length_bins
        return self.min_tokens + round(width * length_bin), self.min_tokens + round(width * (length_bin + 1))

    def digest(self, **more: Any) -> str:
        """Return a digest of the settings and of whatever else decides the samples."""
        content = json.dumps([dataclasses.asdict(self), more], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
