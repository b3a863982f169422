"""Key-value retrieval: the value that stands after a key, by the place of the pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rag_posfix.errors import ConfigError
from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

ASK = 0
SPECIAL = 1


@TASKS.register("key_value", aliases=("key-value", "retrieval"))
@dataclass(frozen=True)
class KeyValue(Task):
    """Tell the value of a key among pairs of keys and values.

    The pair that is asked for is at every place equally often. The error by place shows whether a trained encoding
    reads the middle worse than the ends. Out of the distribution there are twice as many pairs.

    Source: Liu et al. (2024), Lost in the Middle, section 3, https://arxiv.org/abs/2307.03172
    Differs from the paper: a key and a value are one token each, a decoder is trained for the task, and a sequence
    asks for several pairs (as in multi-query associative recall, Arora et al. 2023, Zoology, section 3,
    https://arxiv.org/abs/2312.04927). With one question small decoders stay at a guess among the values of the
    sequence. The measure counts the last question.

    Args:
        pairs: Pairs of a sequence, 2 or more.
        keys: Number of different keys; at least twice ``pairs``, since no key occurs twice.
        values: Number of different values, 2 or more.
        questions: Different pairs that a sequence asks for, 1 to ``pairs``.

    Raises:
        ConfigError: there are too few keys, or more questions than pairs.
    """

    name: ClassVar[str] = "key_value"
    caption: ClassVar[str] = (
        "The share of wrong answers by the place of the pair, a line per seed; do not conclude a U-curve of trained "
        "models from one after few steps, or from a single seed."
    )
    measured_by_place: ClassVar[bool] = True

    pairs: Annotated[int, Integer(2)] = 8
    keys: Annotated[int, Integer(4)] = 32
    values: Annotated[int, Integer(2)] = 8
    questions: Annotated[int, Integer(1)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 2 * self.pairs:
            raise ConfigError(
                f"key_value: keys={self.keys} must be at least twice pairs={self.pairs}; no key occurs twice"
            )
        if self.questions > self.pairs:
            raise ConfigError(
                f"key_value: questions={self.questions} must be at most pairs={self.pairs}; each asks for another pair"
            )

    @property
    def vocabulary(self) -> int:
        """The mark of the question, keys and values."""
        return SPECIAL + self.keys + self.values

    @property
    def splits(self) -> Mapping[str, str]:
        """As many pairs as in training, and twice as many."""
        return {TRAINED: f"{self.pairs} pairs", "longer": f"{2 * self.pairs} pairs"}

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences of 2 pairs + 3 questions tokens; the measure counts the last value."""
        pairs = self.pairs if split == TRAINED else 2 * self.pairs
        keys = torch.rand(size, self.keys, generator=generator).argsort(dim=1)[:, :pairs]
        values = torch.randint(0, self.values, (size, pairs), generator=generator)
        question_positions = torch.rand(size, pairs, generator=generator).argsort(dim=1)[:, : self.questions]  # (B, Q)
        listed = torch.stack((SPECIAL + keys, SPECIAL + self.keys + values), dim=-1)  # (B, P, 2)
        question_pairs = listed.gather(1, question_positions[..., None].expand(-1, -1, 2))  # (B, Q, 2)
        mark = torch.full((size, self.questions, 1), ASK)
        questions = torch.cat((mark, question_pairs), dim=-1).flatten(1)  # (B, 3 Q)
        ids = torch.cat((listed.flatten(1), questions), dim=1)
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, 2 * pairs + 2 :: 3] = True
        scored = torch.zeros_like(wanted)
        scored[:, -1] = True
        return create_batch(ids, wanted, scored, places=question_positions[:, -1])
