"""Finding keys and values of token segments in the passage KV store, and adding them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rag_posfix.caching.kv.entry import EntryShape, PassageKV
from rag_posfix.caching.kv.keys import Part, passage_key
from rag_posfix.contracts.cache_salt import own_tags
from rag_posfix.generation.model.sequence_batch import LoadedModel
from rag_posfix.generation.prefill.encode_segments import Segment
from rag_posfix.patching.forward_context import Overrides

if TYPE_CHECKING:
    from rag_posfix.caching.kv.store import PassageStore


@dataclass(frozen=True, slots=True, eq=False)
class KVRequest:
    """A segment of tokens whose keys and values are asked for.

    Attributes:
        segment: The tokens and their positions.
        before: What was read before them: all that their keys and values depend on besides the model.
        tags: What the entry can be dropped by: the content keys of its passages.
    """

    segment: Segment
    before: tuple[Segment, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KVLookup:
    """The passage KV store as one prompt under one method sees it.

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

    def independent_part(self, overrides: Overrides) -> Part:
        """Return the key part of segments that are encoded independently: what changes them besides their tokens.

        Methods that differ in nothing else share entries.
        """
        return "apart", overrides.rope_base_factor, overrides.layer_scale

    def prefix_part(self, overrides: Overrides) -> Part:
        """Return the key part of a prompt's first tokens. What is read causally is shared between methods."""
        causal = overrides.attend is None and overrides.mask is None and not overrides.rotates_in_hook
        return "leading", overrides.rope_base_factor, overrides.layer_scale, "" if causal else self.method

    def find(self, loaded: LoadedModel, part: Part, requests: Sequence[KVRequest]) -> list[Tensor | None]:
        """Return the keys and values (2, L, Hkv, T, D) of each segment, on the model's device; None if not stored."""
        keys = [self._key(loaded.model.dtype, part, request) for request in requests]
        shape, dtype = loaded.spec.shape, loaded.model.dtype
        shapes = {
            key: EntryShape(shape.n_layers, shape.n_kv_heads, shape.head_dim, dtype, len(request.segment))
            for key, request in zip(keys, requests, strict=True)
        }
        found = self.store.get_many(shapes)
        return [found[key].states.to(loaded.device) if key in found else None for key in keys]

    def add(self, part: Part, encoded: Sequence[tuple[KVRequest, Tensor]]) -> None:
        """Add the keys and values of segments to the store."""
        if not encoded:
            return
        entries: dict[str, PassageKV] = {}
        tags: dict[str, Sequence[str]] = {}
        for request, states in encoded:
            key = self._key(states.dtype, part, request)
            entries[key] = PassageKV(states)
            tags[key] = (*request.tags, *own_tags(self.salt, request.tags))
        self.store.put_many(entries, tags)

    def _key(self, dtype: torch.dtype, part: Part, request: KVRequest) -> str:
        before = tuple(token for segment in request.before for token in segment.token_ids)
        positions = torch.cat([segment.positions for segment in (*request.before, request.segment)])
        where = (part, _consecutive_runs(positions))
        return passage_key(self.model, dtype, where, before, request.segment.token_ids, self.salt)


def _consecutive_runs(positions: Tensor) -> tuple[tuple[float, int], ...]:
    """Return positions as runs of consecutive ones: first and length of each."""
    values: list[float] = positions.tolist()
    runs, first = [], 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            runs.append((values[first], i - first))
            first = i
    return tuple(runs)
