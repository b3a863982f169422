"""Base class of tasks: frozen dataclasses that draw batches of examples, in and out of the training distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rag_posfix.contracts.method_spec import Parametrised
from rag_posfix.registry import Registry

IGNORED = -100
"""Target of a place where nothing is to be predicted."""

TRAINED = "in"
"""Name of the split that training draws from."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Examples of one split.

    Attributes:
        ids: Tokens.
        targets: The token after each one where the loss counts it, else ``IGNORED``.
        scored: Whether the measure counts a target.
        places: The place of what is asked for, in tasks that measure by place.

    Shapes:
        ids, targets, scored: (B, T). places: (B,).
    """

    ids: Tensor
    targets: Tensor
    scored: Tensor
    places: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the tokens and targets on a device; places stay where they are."""
        return Batch(self.ids.to(device), self.targets.to(device), self.scored.to(device), self.places)


@dataclass(frozen=True)
class Task(Parametrised, ABC):
    """A task on generated sequences, with its sizes as dataclass fields.

    Attributes:
        name: Registry name, equal to the name of the file.
        paper: Where the task comes from: the section ``Source`` of the docstring.
        caption: One sentence: what one sees in the figure of ``lab run``; do not conclude what.
        metric: "error": share of examples with a wrong scored token, in percent. "perplexity" of the scored tokens.
        measured_by_place: Whether the measure is also given by ``Batch.places``.
    """

    caption: ClassVar[str] = ""
    metric: ClassVar[Literal["error", "perplexity"]] = "error"
    measured_by_place: ClassVar[bool] = False

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def splits(self) -> Mapping[str, str]:
        """What each split holds, by name: ``TRAINED`` first, then those out of the training distribution."""

    @property
    def data(self) -> Mapping[str, str]:
        """Name and digest of the file that the examples are of; empty if they are generated."""
        return {}

    @abstractmethod
    def batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Return examples of a split; equal generators give equal examples.

        Args:
            split: One of ``splits``.
        """

    def training_batch(self, size: int, generator: torch.Generator) -> Batch:
        """Return examples to train on: those of ``TRAINED``, unless a task holds a part of its text out."""
        return self.batch(TRAINED, size, generator)


TASKS: Registry[type[Task]] = Registry("task")


def next_token_targets(ids: Tensor, wanted: Tensor) -> Tensor:
    """Return the token after each place where ``wanted`` marks that token, else ``IGNORED``.

    Shapes:
        ids: (B, T). wanted: (B, T) bool, marks tokens to be predicted. returns: (B, T); the last place is ignored.
    """
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = torch.where(wanted[:, 1:], ids[:, 1:], IGNORED)
    return targets


def create_batch(ids: Tensor, wanted: Tensor, scored: Tensor | None = None, places: Tensor | None = None) -> Batch:
    """Return the batch for predicting the tokens marked in ``wanted``; ``scored`` marks the measured ones, if others.

    Shapes:
        ids, wanted, scored: (B, T), masks over the tokens themselves. places: (B,).
    """
    counted = wanted if scored is None else scored
    before = torch.zeros_like(counted)
    before[:, :-1] = counted[:, 1:]
    return Batch(ids, next_token_targets(ids, wanted), before, places)
