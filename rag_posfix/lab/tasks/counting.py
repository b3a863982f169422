"""Counting: how often a variable was incremented since it was set, among operations that do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from rag_posfix.lab.tasks.base import TASKS, TRAINED, Batch, Task, create_batch
from rag_posfix.parameters import Integer

FEWEST_STEPS = 3
MOST = 10
WEIGHT_SET, WEIGHT_ADD, WEIGHT_PASS = 1.0, 7.0, 50.0
PAD, PASS = 0, 1
FIRST_VALUE = 2
FIRST_VARIABLE = FIRST_VALUE + MOST + 1  # each has three tokens: set, increment, print
SET, ADD, PRINT = range(3)
KINDS = 3


@TASKS.register("counting", presets={"counting_published": {"steps": 512}})
@dataclass(frozen=True)
class Counting(Task):
    """Tell the value of a variable after a sequence of operations.

    Operations set a variable to 0, increment it or do nothing, with the weights 1, 7 and 50; a sequence ends with the
    question for one variable and its value, at most 10. Out of the distribution as many operations count, and there is
    half as much that does nothing between them (dense) or twice as much (sparse).

    Source: Golovneva et al. (2024), Contextual Position Encoding, https://arxiv.org/abs/2405.18719
    Differs from the paper: an operation is one token; ``set`` sets to 0; every variable is set before the first step;
        the splits out of the distribution are ours; examples are drawn without end instead of 10,000.

    Args:
        steps: Most operations of a sequence, at least 6; their number is drawn from 3 on. 512 in the paper.
        variables: Number of variables, 1 or more; 1, 3 and 5 in the paper.
    """

    name: ClassVar[str] = "counting"
    caption: ClassVar[str] = (
        "The share of sequences whose count is wrong by encoding and split, a mark per seed; do not conclude that an "
        "encoding cannot count which did not learn to in the distribution."
    )

    steps: Annotated[int, Integer(6)] = 64
    variables: Annotated[int, Integer(1)] = 1

    @property
    def vocabulary(self) -> int:
        """Padding, pass, the values 0 to 10, and three tokens per variable."""
        return FIRST_VARIABLE + KINDS * self.variables

    @property
    def splits(self) -> Mapping[str, str]:
        """Sequences as in training, with half and with twice the steps that do nothing."""
        return {
            name: f"{FEWEST_STEPS} to {steps} steps, pass weighs {weight:g} of {weight + WEIGHT_SET + WEIGHT_ADD:g}"
            for name, (steps, weight) in self._sizes().items()
        }

    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return sequences, padded at the end; the measure counts the value."""
        steps, weight = self._sizes()[split]
        lengths = torch.randint(FEWEST_STEPS, steps + 1, (size,), generator=generator)
        weights = torch.tensor([WEIGHT_SET, WEIGHT_ADD, weight])
        kinds = torch.multinomial(weights, size * steps, replacement=True, generator=generator).view(size, steps)
        which = torch.randint(0, self.variables, (size, steps), generator=generator)
        question = torch.randint(0, self.variables, (size,), generator=generator)
        operations, values = self._run(kinds, which, lengths)
        return _with_question(operations, lengths + self.variables, question, values)

    def _sizes(self) -> dict[str, tuple[int, float]]:
        """Return the most steps and the weight of passes of each split; steps that count are equally many."""
        total = WEIGHT_SET + WEIGHT_ADD + WEIGHT_PASS
        return {
            TRAINED: (self.steps, WEIGHT_PASS),
            "dense": (self.steps // 2, total / 2 - WEIGHT_SET - WEIGHT_ADD),
            "sparse": (2 * self.steps, 2 * total - WEIGHT_SET - WEIGHT_ADD),
        }

    def _run(self, kinds: Tensor, which: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of the operations, every variable set first, and the values after them."""
        size, steps = kinds.shape
        rows = torch.arange(size)
        values = torch.zeros(size, self.variables, dtype=torch.long)
        columns = [torch.full((size,), FIRST_VARIABLE + KINDS * variable + SET) for variable in range(self.variables)]
        for step in range(steps):
            kind, variable = kinds[:, step], which[:, step]
            runs = step < lengths
            value = values[rows, variable]
            sets, adds = runs & (kind == SET), runs & (kind == ADD) & (value < MOST)
            values[rows, variable] = torch.where(sets, 0, value + adds.long())
            token = FIRST_VARIABLE + KINDS * variable + torch.where(sets, SET, ADD)
            columns.append(torch.where(sets | adds, token, PASS))
        return torch.stack(columns, dim=1), values


def _with_question(operations: Tensor, lengths: Tensor, question: Tensor, values: Tensor) -> Batch:
    """Return operations up to each length, then the question and the value, then padding."""
    size, longest = operations.shape
    rows, positions = torch.arange(size), torch.arange(longest + 2)
    ids = torch.cat((operations, torch.full((size, 2), PAD)), dim=1)
    ids = torch.where(positions < lengths[:, None], ids, PAD)
    ids[rows, lengths] = FIRST_VARIABLE + KINDS * question + PRINT
    ids[rows, lengths + 1] = FIRST_VALUE + values[rows, question]
    return create_batch(ids, positions == lengths[:, None] + 1)
