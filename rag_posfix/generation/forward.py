"""One forward pass over a batch of rows with a cache. The only place that calls the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rag_posfix.patching.call import Edits, Observer, Scratch, SeamCall, active
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
        positions: (R, length) float32, positions so far.
        padding: (R, length) bool, True for real tokens; None where no row is padded.
        edits: What the plan asks of the model. Rows with edits do not share a batch with rows that have others.
        n_prompt: Tokens of the prompt; 0 until it has been read.
    """

    loaded: LoadedModel
    cache: Any
    positions: Tensor
    padding: Tensor | None = None
    edits: Edits = field(default_factory=Edits)
    scratch: Scratch = field(default_factory=Scratch)
    n_prompt: int = 0
    length: int = field(default=0)

    @property
    def n_rows(self) -> int:
        """How many sequences the batch holds."""
        return self.positions.shape[0]

    @property
    def plain(self) -> bool:
        """Whether the next tokens are read as the unmodified model would read them, at the rows' positions."""
        edits = self._edits_now()
        return not (edits.holds_rotation or edits.sets_angles) and edits.attend is None

    def forward(self, token_ids: Tensor, positions: Tensor, keep: int, observer: Observer | None = None) -> Tensor:
        """Append tokens to every row and return the logits of the last ``keep`` of them.

        Shapes:
            token_ids: (R, Tq). positions: (R, Tq) float32.
            returns: (R, keep, V), in the model's dtype.
        """
        edits = self._edits_now()
        self.positions = torch.cat((self.positions, positions), dim=1)
        self.length += token_ids.shape[1]
        if self.padding is not None:
            self.padding = torch.cat((self.padding, self.padding.new_ones(token_ids.shape)), dim=1)
        call = SeamCall(edits, self.positions, self.loaded.spec, self.scratch, self.n_prompt or self.length, observer)
        with active(call):
            output = self.loaded.model(
                input_ids=token_ids,
                position_ids=_as_ids(positions),
                attention_mask=None if self.padding is None else self.padding.long(),
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        self.n_prompt = self.n_prompt or self.length
        logits: Tensor = output.logits
        return logits

    def next_positions(self, count: int = 1) -> Tensor:
        """Return the positions of the next ``count`` tokens: they continue after the last. (R, count)."""
        steps = torch.arange(1, count + 1, device=self.positions.device)
        return self.positions[:, -1:] + steps

    def select(self, kept: Sequence[int]) -> Rows:
        """Return the batch with only some of its rows; these rows are used up."""
        index = torch.tensor(kept, device=self.positions.device)
        self.cache.batch_select_indices(index)
        padding = None if self.padding is None else self.padding[index]
        return replace(self, positions=self.positions[index], padding=padding)

    def fork(self) -> Rows:
        """Return rows that advance on their own from here; these stay as they are."""
        return Rows(
            loaded=self.loaded,
            cache=copy.deepcopy(self.cache),
            positions=self.positions,
            padding=self.padding,
            edits=self.edits,
            scratch=self.scratch.copy(),
            n_prompt=self.n_prompt,
            length=self.length,
        )

    def first(self, length: int) -> Rows:
        """Return rows that hold the first ``length`` tokens and no edits; these stay as they are.

        For unpadded rows of models whose every layer keeps all keys.
        """
        cache = new_cache(self.loaded)
        for index, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
        return Rows(self.loaded, cache, self.positions[:, :length], length=length)

    def _edits_now(self) -> Edits:
        """Return the edits of the next pass. What is plain from here on costs nothing any more."""
        edits = self.edits
        if self.n_prompt and edits.mask is not None:  # generated tokens see all before them
            edits = replace(edits, mask=None)
        attend = edits.attend
        if attend is not None and attend.plain_from is not None and self.length >= attend.plain_from:
            edits = replace(edits, attend=None)
        return edits


def _as_ids(positions: Tensor) -> Tensor:
    """Return whole positions as integers, as the model was trained with them, and fractional ones as they are."""
    whole = positions.round()
    return whole.long() if torch.equal(whole, positions) else positions
