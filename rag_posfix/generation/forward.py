"""One forward pass over a batch of rows with a cache. The only place that calls the model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rag_posfix.attention.plan import MaskFunction
from rag_posfix.patching.seam import Observer, SeamCall, active
from rag_posfix.patching.spec import ModelSpec

__all__ = ["LoadedModel", "Rows", "new_cache"]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model with the seam on it, and what is known of it."""

    model: Any
    spec: ModelSpec

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device


def new_cache(loaded: LoadedModel) -> Any:
    """Return an empty key/value cache of the model's own kind."""
    return DynamicCache(config=loaded.model.config)


@dataclass(slots=True, eq=False)
class Rows:
    """Sequences that advance together: a batch with its cache, its padding and its positions.

    Attributes:
        loaded: The model.
        cache: Keys and values of all tokens so far.
        length: Tokens in the cache, padding included.
        positions: (R, length) or (Hq, length) positions so far; (Hq, ...) only with one row whose heads differ.
        padding: (R, length) bool, True for real tokens; None where no row is padded.
        mask: Complete mask that replaces the causal one; one row only.
        per_head: Whether positions differ between heads, so that the seam rotates.
    """

    loaded: LoadedModel
    cache: Any
    positions: Tensor
    padding: Tensor | None = None
    mask: MaskFunction | None = None
    per_head: bool = False
    length: int = field(default=0)

    @property
    def n_rows(self) -> int:
        """How many sequences the batch holds."""
        return 1 if self.per_head else self.positions.shape[0]

    def forward(self, token_ids: Tensor, positions: Tensor, keep: int, observer: Observer | None = None) -> Tensor:
        """Append tokens to every row and return the logits of the last ``keep`` of them.

        Shapes:
            token_ids: (R, Tq). positions: (R | Hq, Tq) float32.
            returns: (R, keep, V), in the model's dtype.
        """
        self.positions = torch.cat((self.positions, positions), dim=1)
        self.length += token_ids.shape[1]
        if self.padding is not None:
            self.padding = torch.cat((self.padding, self.padding.new_ones(token_ids.shape)), dim=1)
        call = SeamCall(
            mask=self.mask,
            positions=self.positions if self.per_head else None,
            angles=self.loaded.spec.angles,
            observer=observer,
        )
        with active(call):
            output = self.loaded.model(
                input_ids=token_ids,
                # With per-head positions the seam rotates; the model still wants a list to build its masks from.
                position_ids=None if self.per_head else _as_ids(positions),
                attention_mask=None if self.padding is None else self.padding.long(),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: Tensor = output.logits
        return logits

    def next_positions(self, count: int = 1) -> Tensor:
        """Return the positions of the next ``count`` tokens: they continue after the last. (R | Hq, count)."""
        steps = torch.arange(1, count + 1, device=self.positions.device)
        return self.positions[:, -1:] + steps

    def fork(self) -> Rows:
        """Return rows that advance on their own from here; these stay as they are."""
        return Rows(
            loaded=self.loaded,
            cache=copy.deepcopy(self.cache),
            positions=self.positions,
            padding=self.padding,
            mask=self.mask,
            per_head=self.per_head,
            length=self.length,
        )


def _as_ids(positions: Tensor) -> Tensor:
    """Return whole positions as integers, as the model was trained with them, and fractional ones as they are."""
    whole = positions.round()
    return whole.long() if torch.equal(whole, positions) else positions
