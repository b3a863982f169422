"""Types of request bodies: a value of another JSON type is refused, not converted, as the schema says."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Tag, WithJsonSchema

from rag_posfix_api.dialects.conversation import MAX_STOP_CHARACTERS, MAX_STOPS
from rag_posfix_api.dialects.documents import Forms

__all__ = ["WHOLE", "Count", "Integer", "Natural", "Passages", "RequestModel", "Seed", "StopList", "StopStrings"]


class RequestModel(BaseModel):
    """A part of a request. ``"1"`` is no number, and ``1`` is no truth value."""

    model_config = ConfigDict(strict=True)


def _whole(value: Any) -> Any:
    """Return 226.0 as 226: JSON has one kind of number, and some clients write all of them with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_64_bits(seed: int) -> int:
    return seed if -(2**63) <= seed < 2**63 else seed % 2**63


WHOLE = BeforeValidator(_whole)
"""Takes whole numbers with a decimal point; stands after the bounds, or the schema loses them."""

Integer = Annotated[int, BeforeValidator(_whole)]
"""A whole number, with or without a decimal point."""

Natural = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
"""A whole number from 0 on."""

Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
"""A whole number from 1 on."""

Passages = Annotated[int, Field(ge=1, le=1000), BeforeValidator(_whole)]
"""A number of passages to retrieve."""

Seed = Annotated[int, BeforeValidator(_whole), AfterValidator(_in_64_bits)]
"""A seed; those of more than 64 bits are reduced."""

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}

StopList = Annotated[list[str], Field(fail_fast=True), WithJsonSchema(_STOPS)]
"""Stop strings; ``conversation.check_stops`` checks their limits, with status 400."""

StopStrings = Annotated[
    Annotated[str, Tag("string"), WithJsonSchema(_STOP)] | Annotated[StopList, Tag("array")], Forms("string", "array")
]
"""A stop string, or several."""
