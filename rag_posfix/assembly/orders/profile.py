"""An order that puts the best documents at the positions to which the model pays most attention."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderFacts, best_first
from rag_posfix.errors import ConfigError

__all__ = ["Profile", "interpolated_profile"]

MOST_SLOTS = 1000
FILE_BYTES = 1 << 20


@ORDERS.register("profile")
@dataclass(frozen=True, slots=True)
class Profile(Order):
    """The best document in the slot with the highest measured attention, the second best in the next, and so on.

    Source: AttnRank, "Attention Basin" (2025), section 4, https://arxiv.org/abs/2508.05128
    Formula: the document of rank r is placed in the slot with the r-th highest value of the profile; of equal slots
        the earlier one comes first.
    Differs from the paper: a profile of n slots is linearly interpolated for m documents: slot j of m has the
        profile's value at j (n - 1) / (m - 1). The paper measures a profile for each number of documents.
    Cost: none; the profile is measured once per model and template (``rag-posfix probe slot-attention``).
    Limits: no better than the scores and the profile. A profile of another model, or of a very different number of
        slots, may not apply.

    Args:
        slots: The measured value of each slot, first to last, two or more, finite; larger is better.
        file: A JSON file with these values: an object with ``profile``, as ``rag-posfix probe slot-attention`` writes
            it, or a list. Read once, when the order is created; empty if ``slots`` is given.

    Raises:
        ConfigError: neither or both are given, or the numbers or the file cannot be used.
    """

    example: ClassVar[Mapping[str, Any]] = MappingProxyType({"slots": (0.4, 0.2, 0.1, 0.3)})

    slots: tuple[float, ...] = ()
    file: str = ""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.slots):
            raise ConfigError(
                "order 'profile' needs the measured value of each slot, once: profile:slots=[0.4,0.2,0.3], or "
                "profile:file=PATH of a record that rag-posfix probe slot-attention wrote, or the setting profile"
            )
        slots = _read(self.file) if self.file else self.slots
        object.__setattr__(self, "slots", _checked(slots))
        object.__setattr__(self, "file", "")

    def __call__(self, facts: OrderFacts) -> tuple[int, ...]:
        """Return the permutation."""
        ranked = best_first(facts.relevance)
        values = interpolated_profile(self.slots, len(ranked))
        best_slots = sorted(range(len(values)), key=lambda slot: -values[slot])
        document_in = dict(zip(best_slots, ranked, strict=True))
        return tuple(document_in[slot] for slot in range(len(ranked)))


def interpolated_profile(profile: tuple[float, ...], count: int) -> tuple[float, ...]:
    """Return a profile for ``count`` slots, linearly interpolated; the first and last values are kept.

    Args:
        profile: The measured values, two or more.
        count: Number of slots.
    """
    if count == len(profile):
        return profile
    if count < 2:
        return profile[:count]
    values = []
    pairs = list(pairwise(profile))
    for slot in range(count):
        # Integer arithmetic, so that mirrored slots of a symmetric profile get exactly the same value.
        left, rest = divmod(slot * len(pairs), count - 1)
        low, high = pairs[left] if left < len(pairs) else (profile[-1], profile[-1])
        values.append((low * (count - 1 - rest) + high * rest) / (count - 1))
    return tuple(values)


def _read(file: str) -> Any:
    try:
        with Path(file).open("rb") as opened:
            data = json.loads(opened.read(FILE_BYTES))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"order 'profile': file={file!r} cannot be read ({reason}); give a record that rag-posfix probe "
            "slot-attention wrote"
        ) from error
    return data.get("profile") if isinstance(data, dict) else data


def _checked(slots: Any) -> tuple[float, ...]:
    sound = isinstance(slots, list | tuple) and 2 <= len(slots) <= MOST_SLOTS
    if not sound or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in slots
    ):
        shown = repr(slots)
        raise ConfigError(
            f"order 'profile': slots={shown if len(shown) < 200 else shown[:200] + '...'} must be a list of 2 to "
            f"{MOST_SLOTS} finite numbers, one per slot, first to last"
        )
    return tuple(float(value) for value in slots)
