"""Selective copy: repeat the tokens of a sequence in order, and leave out its blanks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

BLANK, COPY = 0, 1
SPECIAL = 2


@TASKS.register(
    "selective_copy", aliases=("selective-copy",), presets={"selective_copy_published": {"tokens": 256, "blanks": 256}}
)
@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Repeat the tokens of a sequence in order, without the blanks between them.

    A sequence mixes tokens and blanks at random; after a mark, the tokens follow once more in their order. Out of the
    distribution there are half as many blanks (dense) or twice as many (sparse).

    Source: Gu and Dao (2023), Mamba, section 3.1, https://arxiv.org/abs/2312.00752; as in Golovneva et al. (2024),
        https://arxiv.org/abs/2405.18719
    Differs from the paper: the number of different tokens is not given there; here it is ``symbols``.

    Args:
        tokens: Tokens to copy, 1 or more; 256 in the paper.
        blanks: Blanks in training, 2 or more; 256 in the paper.
        symbols: Number of different tokens, 2 or more.
    """

    name: ClassVar[str] = "selective_copy"
    caption: ClassVar[str] = (
        "The share of sequences that are not copied without an error by encoding and split, a mark per seed; do not "
        "conclude that one which errs in the distribution fails for its positions."
    )

    tokens: Annotated[int, Integer(1)] = 16
    blanks: Annotated[int, Integer(2)] = 16
    symbols: Annotated[int, Integer(2)] = 16

    @property
    def vocabulary(self) -> int:
        """A blank, the mark, and the symbols."""
        return SPECIAL + self.symbols

    @property
    def splits(self) -> Mapping[str, str]:
        """Sequences as in training, with half and with twice the blanks."""
        return {
            name: f"{self.tokens} tokens, {blanks} blanks"
            for name, blanks in ((TRAINED, self.blanks), ("dense", self.blanks // 2), ("sparse", 2 * self.blanks))
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences of 2 ``tokens`` + blanks + 1 tokens; the measure counts the copy."""
        blanks = {TRAINED: self.blanks, "dense": self.blanks // 2}.get(split, 2 * self.blanks)
        copied = SPECIAL + torch.randint(0, self.symbols, (size, self.tokens), generator=generator)
        order = torch.rand(size, self.tokens + blanks, generator=generator).argsort(dim=1)
        positions = order[:, : self.tokens].sort(dim=1).values
        mixed = torch.full((size, self.tokens + blanks), BLANK).scatter(1, positions, copied)
        ids = torch.cat((mixed, torch.full((size, 1), COPY), copied), dim=1)
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[:, -self.tokens :] = True
        return create_batch(ids, wanted)
