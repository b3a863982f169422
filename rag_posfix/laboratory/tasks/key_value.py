"""Key-value retrieval: the value that stands after a key, by the place of the pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rag_posfix.errors import ConfigError
from rag_posfix.laboratory.tasks.base import TASKS, TRAINED, Batch, Task, joined
from rag_posfix.parameters import Whole

__all__ = ["KeyValue"]

ASK = 0
SPECIAL = 1


@TASKS.register("key_value", aliases=("key-value", "retrieval"))
@dataclass(frozen=True)
class KeyValue(Task):
    """Tell the value of a key among pairs of keys and values.

    The pair that is asked for is at every place equally often. The error by place shows whether a trained encoding
    reads the middle worse than the ends. Out of the distribution there are twice as many pairs.

    Source: Liu et al. (2024), Lost in the Middle, section 3, https://arxiv.org/abs/2307.03172
    Differs from the paper: a key and a value are one token each, and a decoder is trained for the task.

    Args:
        pairs: Pairs of a sequence, 2 or more.
        keys: Number of different keys; at least twice ``pairs``, since no key occurs twice.
        values: Number of different values, 2 or more.

    Raises:
        ConfigError: there are too few keys.
    """

    name: ClassVar[str] = "key_value"
    source: ClassVar[str] = "Liu et al. (2024), Lost in the Middle, https://arxiv.org/abs/2307.03172"
    deviations: ClassVar[tuple[str, ...]] = ("Keys and values are one token each.",)
    measured_by_place: ClassVar[bool] = True

    pairs: Annotated[int, Whole(2)] = 16
    keys: Annotated[int, Whole(4)] = 64
    values: Annotated[int, Whole(2)] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keys < 2 * self.pairs:
            raise ConfigError(
                f"key_value: keys={self.keys} must be at least twice pairs={self.pairs}; no key occurs twice"
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
        """Return sequences of 2 pairs + 3 tokens; the measure counts the value."""
        pairs = self.pairs if split == TRAINED else 2 * self.pairs
        keys = torch.rand(size, self.keys, generator=generator).argsort(dim=1)[:, :pairs]
        values = torch.randint(0, self.values, (size, pairs), generator=generator)
        places = torch.randint(0, pairs, (size,), generator=generator)
        rows = torch.arange(size)
        listed = torch.stack((SPECIAL + keys, SPECIAL + self.keys + values), dim=-1).flatten(1)  # (B, 2 pairs)
        question = torch.stack(
            (torch.full((size,), ASK), listed[rows, 2 * places], listed[rows, 2 * places + 1]), dim=1
        )
        ids = torch.cat((listed, question), dim=1)
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, -1] = True
        return joined(ids, wanted, places=places)
