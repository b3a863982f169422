"""Counting a word in the last of several sentences, as a person would: from the last sentence end on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

PAD, END = 0, 1
FIRST_WORD = 2
FEWEST_WORDS = 2
LONGER = 4


@TASKS.register("last_sentence", aliases=("last-sentence", "word_count"))
@dataclass(frozen=True)
class LastSentence(Task):
    """Tell how often a word stands in the last of two sentences.

    Two sentences of random words, each with its end; then a word and how often the last sentence has it. Words of the
    first sentence do not count, so the answer depends on the place of the last sentence end. Out of the distribution
    the first sentence is four times as long (longer), or four sentences stand before the last (more).

    Source: Golovneva et al. (2024), Contextual Position Encoding, section 3, whose example counts a word in the last
        sentence of a text about Alice, https://arxiv.org/abs/2405.18719
    Differs from the paper: random words; the paper asks a large language model and trains none.

    Args:
        length: Most words of a sentence, 3 or more; their number is drawn from 2 on.
        words: Number of different words, 2 or more.
    """

    name: ClassVar[str] = "last_sentence"
    caption: ClassVar[str] = (
        "The share of texts whose count is wrong by encoding and split, a mark per seed; do not conclude from random "
        "words that a language model counts or fails on sentences."
    )

    length: Annotated[int, Integer(3)] = 16
    words: Annotated[int, Integer(2)] = 6

    @property
    def vocabulary(self) -> int:
        """Padding, the sentence end, the words, and the counts 0 to ``length``."""
        return FIRST_WORD + self.words + self.length + 1

    @property
    def splits(self) -> Mapping[str, str]:
        """Two sentences as in training, a longer first one, and more sentences."""
        return {
            TRAINED: f"2 sentences of up to {self.length} words",
            "longer": f"a first sentence of up to {LONGER * self.length} words",
            "more": f"{LONGER + 1} sentences",
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences, padded at the end; the measure counts the answer."""
        before = LONGER if split == "more" else 1
        longest = LONGER * self.length if split == "longer" else self.length
        lengths = torch.cat(
            [
                torch.randint(FEWEST_WORDS, longest + 1, (size, before), generator=generator),
                torch.randint(FEWEST_WORDS, self.length + 1, (size, 1), generator=generator),
            ],
            dim=1,
        )  # (B, sentences)
        ends = (lengths + 1).cumsum(dim=1) - 1  # where each sentence ends
        widest = before * (longest + 1) + self.length + 1
        positions = torch.arange(widest)
        ids = torch.randint(0, self.words, (size, widest), generator=generator) + FIRST_WORD
        ids.scatter_(1, ends, END)
        word = torch.randint(0, self.words, (size, 1), generator=generator) + FIRST_WORD
        last = (positions > ends[:, -2:-1]) & (positions < ends[:, -1:])
        counts = ((ids == word) & last).sum(dim=1)
        return self._with_question(ids, ends[:, -1] + 1, word[:, 0], counts)

    def _with_question(self, ids: Tensor, lengths: Tensor, word: Tensor, counts: Tensor) -> Batch:
        """Return texts up to each length, then the word and its count, then padding."""
        size, longest = ids.shape
        rows, positions = torch.arange(size), torch.arange(longest + 2)
        ids = torch.cat((ids, torch.full((size, 2), PAD)), dim=1)
        ids = torch.where(positions < lengths[:, None], ids, PAD)
        ids[rows, lengths] = word
        ids[rows, lengths + 1] = FIRST_WORD + self.words + counts
        return create_batch(ids, positions == lengths[:, None] + 1)
