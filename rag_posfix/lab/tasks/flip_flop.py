"""Flip-flop: remember one bit over many instructions that do not matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer, Number

WRITE, READ, IGNORE = 2, 3, 4


@TASKS.register("flip_flop", aliases=("flip-flop",), presets={"flip_flop_published": {"pairs": 256}})
@dataclass(frozen=True)
class FlipFlop(Task):
    """Predict the bit after a read: that of the last write.

    A sequence is made of pairs of an instruction (write, read, ignore) and a bit. It begins with a write and ends with
    a read. The bit after a read is that of the last write; other bits are random. Out of the distribution more pairs
    are to be ignored, so the last write is farther away; or there are twice the pairs, with distances as in training.

    Source: Liu et al. (2023), Exposing Attention Glitches with Flip-Flop Language Modeling,
        https://arxiv.org/abs/2306.00946; as in Golovneva et al. (2024), https://arxiv.org/abs/2405.18719
    Differs from the paper: the loss counts the bits after reads alone, since other bits cannot be predicted.

    Args:
        pairs: Pairs of a sequence, 2 or more; 256 in the paper.
        ignored: Share of pairs to be ignored in training, below 1; writes and reads share the rest evenly.
        ignored_far: The same out of the distribution.
    """

    name: ClassVar[str] = "flip_flop"
    caption: ClassVar[str] = (
        "The share of sequences whose last bit is wrong by encoding and split, a mark per seed; do not conclude an "
        "order of encodings whose seeds overlap, or from one that errs in the distribution."
    )

    pairs: Annotated[int, Integer(2)] = 64
    ignored: Annotated[float, Number(0, 1)] = 0.8
    ignored_far: Annotated[float, Number(0, 1)] = 0.98

    @property
    def vocabulary(self) -> int:
        """Two bits and three instructions."""
        return 5

    @property
    def splits(self) -> Mapping[str, str]:
        """Sequences as in training, with fewer writes, and longer ones."""
        return {
            TRAINED: f"{self.pairs} pairs, {self.ignored:.0%} ignored",
            "sparse": f"{self.pairs} pairs, {self.ignored_far:.0%} ignored",
            "longer": f"{2 * self.pairs} pairs, {self.ignored:.0%} ignored",
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences of 2 ``pairs`` tokens, of twice as many in ``longer``; the measure counts the last bit."""
        ignored = self.ignored_far if split == "sparse" else self.ignored
        pairs = 2 * self.pairs if split == "longer" else self.pairs
        draw = torch.rand(size, pairs, generator=generator)
        kind = torch.where(draw < ignored, IGNORE, torch.where(draw < (1 + ignored) / 2, WRITE, READ))
        kind[:, 0], kind[:, -1] = WRITE, READ
        bits = torch.randint(0, 2, (size, pairs), generator=generator)
        positions = torch.arange(pairs).expand(size, -1)
        last_write = torch.where(kind == WRITE, positions, 0).cummax(dim=1).values
        bits = torch.where(kind == READ, bits.gather(1, last_write), bits)
        ids = torch.stack((kind, bits), dim=-1).flatten(1)  # (B, 2 pairs)
        wanted = torch.stack((torch.zeros_like(kind, dtype=torch.bool), kind == READ), dim=-1).flatten(1)
        scored = torch.zeros_like(wanted)
        scored[:, -1] = True
        return create_batch(ids, wanted, scored)
