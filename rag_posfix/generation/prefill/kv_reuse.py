"""What the engine asks the passage store: keys and values of stretches of tokens that some prompt read before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.kv.keys import Part, passage_key
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.encode import Stretch
from rag_posfix.patching.call import Edits

if TYPE_CHECKING:
    from rag_posfix.caching.kv.store import PassageStore

__all__ = ["Reuse", "Wanted"]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A stretch of tokens whose keys and values are asked for.

    Attributes:
        stretch: The tokens and their positions.
        before: What was read before them: all that their keys and values depend on besides the model.
        tags: What the entry can be dropped by: the content keys of its passages.
    """

    stretch: Stretch
    before: tuple[Stretch, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The store as one prompt under one method sees it.

    Attributes:
        store: Keeps keys and values.
        model: Identity of weights and dtype.
        method: Identity of the method and its parameters.
        salt: Entries of another salt are not seen: one per tenant.
    """

    store: PassageStore
    model: str
    method: str
    salt: str = ""

    def apart(self, edits: Edits) -> Part:
        """Return what the encoding of stretches that are read apart depends on besides tokens and positions.

        Methods that differ in other things than these share entries.
        """
        return "apart", edits.rope_base_factor, edits.layer_scale

    def leading(self, edits: Edits) -> Part:
        """Return the same for the leading tokens of a prompt. What is read causally is shared between methods."""
        causal = edits.attend is None and edits.mask is None and not edits.holds_rotation
        return "leading", edits.rope_base_factor, edits.layer_scale, "" if causal else self.method

    def find(self, loaded: LoadedModel, part: Part, wanted: Sequence[Wanted]) -> list[Tensor | None]:
        """Return the keys and values (2, L, Hkv, T, D) of each stretch that is in the store, on the model's device."""
        keys = [self._key(loaded.model.dtype, part, one) for one in wanted]
        shape, dtype = loaded.spec.shape, loaded.model.dtype
        shapes = {
            key: EntryShape(shape.n_layers, shape.n_kv_heads, shape.head_dim, dtype, len(one.stretch))
            for key, one in zip(keys, wanted, strict=True)
        }
        found = self.store.get_many(shapes)
        return [found[key].states.to(loaded.device) if key in found else None for key in keys]

    def keep(self, part: Part, encoded: Sequence[tuple[Wanted, Tensor]]) -> None:
        """Keep the keys and values of stretches."""
        if not encoded:
            return
        entries: dict[str, PassageKV] = {}
        tags: dict[str, Sequence[str]] = {}
        for wanted, states in encoded:
            key = self._key(states.dtype, part, wanted)
            entries[key], tags[key] = PassageKV(states), wanted.tags
        self.store.put_many(entries, tags)

    def _key(self, dtype: torch.dtype, part: Part, wanted: Wanted) -> str:
        before = tuple(token for stretch in wanted.before for token in stretch.token_ids)
        placed = torch.cat([stretch.positions for stretch in (*wanted.before, wanted.stretch)])
        where = (part, _runs_of(placed))
        return passage_key(self.model, dtype, where, before, wanted.stretch.token_ids, self.salt)


def _runs_of(positions: Tensor) -> tuple[tuple[float, int], ...]:
    """Return positions as runs of consecutive ones: first and length of each."""
    values: list[float] = positions.tolist()
    runs, first = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            runs.append((values[first], i - first))
            first = i
    return tuple(runs)
