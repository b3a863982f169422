"""An order that puts the best documents at the positions to which the model pays most attention."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from rag_posfix.assembly.orders.base import ORDERS, Order, OrderInputs, best_first
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import NumberList
from rag_posfix.plan.bias_profile import bias_profile_from, stretched


@ORDERS.register("profile", aliases=("attnrank",))
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
            it, or a list; ``smollm2`` and ``gemma3-270m`` are the shipped ones. Empty if ``slots`` is given.

    Raises:
        ConfigError: no slots are given, or they are no list of finite numbers.
    """

    name = "profile"
    by_content = True
    example = MappingProxyType({"slots": (0.4, 0.2, 0.1, 0.3)})
    file_parameters = MappingProxyType({"file": bias_profile_from("slots")})

    slots: Annotated[tuple[float, ...], NumberList(min_length=2, max_length=1000)] = ()

    def __post_init__(self) -> None:
        if not self.slots:
            raise ConfigError(
                "order 'profile' needs the measured value of each slot: profile:slots=[0.4,0.2,0.3]; the command line "
                "also takes profile:file=PATH, and the settings profile=PATH, of a record of rag-posfix probe "
                "slot-attention, or the name of a packaged model"
            )
        Order.__post_init__(self)

    def __call__(self, inputs: OrderInputs) -> tuple[int, ...]:
        ranked = best_first(inputs.relevance, inputs.keys)
        values = stretched(self.slots, len(ranked))
        best_slots = sorted(range(len(values)), key=lambda slot: -values[slot])
        document_in = dict(zip(best_slots, ranked, strict=True))
        return tuple(document_in[slot] for slot in range(len(ranked)))
