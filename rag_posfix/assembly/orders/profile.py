"""The order that puts the best documents where this model was measured to look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderFacts, best_first
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import Numbers
from rag_posfix.plan.bias_profile import FileReader, bias_profile_from, stretched

__all__ = ["Profile"]


@ORDERS.register("profile", aliases=("attnrank",))
@dataclass(frozen=True, slots=True)
class Profile(Order):
    """Best document into the slot that this model reads best, second best into the next, and so on.

    Source: AttnRank, "Attention Basin" (2025), section 4, https://arxiv.org/abs/2508.05128
    Formula: the document of rank r stands in the slot with the r-th highest value of the profile; of equal slots the
        earlier one comes first.
    Differs from the paper: a profile of n slots serves m documents: it is stretched, slot j of m takes the profile's
        value at place j (n - 1) / (m - 1), linearly between its neighbours. The paper measures for each number.
    Cost: none; the profile is measured once per model and template (``rag-posfix probe slot-attention``).
    Limits: as good as the scores that it goes by, and as the profile: one that was measured on another model, or on
        a number of slots far away, says little.

    Args:
        slots: The measured value of each slot, first to last, two or more, finite; larger is better. On the command
            line, ``file`` names a record of ``rag-posfix probe slot-attention`` in its place.

    Raises:
        ConfigError: no slots are given, or they are no list of finite numbers.
    """

    name: ClassVar[str] = "profile"
    example: ClassVar[Mapping[str, Any]] = MappingProxyType({"slots": (0.4, 0.2, 0.1, 0.3)})
    file_parameters: ClassVar[Mapping[str, FileReader]] = MappingProxyType({"file": bias_profile_from("slots")})

    slots: Annotated[tuple[float, ...], Numbers(-math.inf, math.inf, fewest=2, most=1000)] = ()

    def __post_init__(self) -> None:
        if not self.slots:
            raise ConfigError(
                "order 'profile' needs the measured value of each slot: profile:slots=[0.4,0.2,0.3]; the command line "
                "also takes profile:file=PATH, and the settings profile=PATH, of a record of rag-posfix probe "
                "slot-attention"
            )
        Order.__post_init__(self)

    def __call__(self, facts: OrderFacts) -> tuple[int, ...]:
        """Return the permutation."""
        ranked = best_first(facts.relevance)
        values = stretched(self.slots, len(ranked))
        places = sorted(range(len(values)), key=lambda slot: -values[slot])
        stands = dict(zip(places, ranked, strict=True))
        return tuple(stands[slot] for slot in range(len(ranked)))
