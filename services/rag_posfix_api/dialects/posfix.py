"""What this service adds to the requests of chat dialects: method, order, reranker, index and number of passages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, Tag, model_validator

from rag_posfix.contracts.arrangement_text import read_arrangement
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix_api.collections.store import NAME_PATTERN
from rag_posfix_api.dialects.documents import Forms
from rag_posfix_api.dialects.ranges import within
from rag_posfix_api.dialects.strict import Passages, RequestModel
from rag_posfix_api.http.errors import InvalidRequestError

__all__ = ["MitigationInput", "PosfixInput", "chosen_methods", "mitigation_choice"]

MAX_FIELDS = 16


class MitigationInput(RequestModel):
    """A mitigation and its parameters."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        # Each unknown field would be an error of its own.
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"{len(given)} fields are given; a mitigation has 'name' and 'parameters'")
        return given


class PosfixInput(RequestModel):
    """What this service adds to the API of the dialect, in one object."""

    model_config = ConfigDict(extra="forbid")

    mitigation: (
        Annotated[Annotated[str, Tag("string")] | Annotated[MitigationInput, Tag("object")], Forms("string", "object")]
        | None
    ) = Field(default=None, description="A mitigation by name, or with its parameters.")
    order: str | None = Field(default=None, description="The order that the passages stand in.")
    k: Passages | None = Field(default=None, description="How many passages to retrieve.")
    index: str | None = Field(
        default=None,
        description="Name of the index to retrieve from (RAG_POSFIX_INDEXES); the default one without it.",
    )
    collection: str | None = Field(
        default=None,
        description="Retrieve the passages from this collection.",
        json_schema_extra=within(pattern=NAME_PATTERN),
    )
    arrangement: str | None = Field(
        default=None,
        description="reranker/order/method in one text, for example 'likelihood+embedding/reverse/none', in place of "
        "``mitigation`` and ``order``. An empty reranker is the service's own.",
    )


def chosen_methods(given: PosfixInput) -> dict[str, Any]:
    """Return the fields of a ``Question`` that a request chooses; None takes the default.

    Args:
        given: What the request chooses.

    Raises:
        InvalidRequestError: an arrangement stands beside a mitigation or an order.
        ConfigError: the arrangement cannot be read.
    """
    chosen: dict[str, Any] = {
        "mitigation": mitigation_choice(given.mitigation),
        "order": given.order,
        "k": given.k,
        "index": given.index,
    }
    if given.arrangement is None:
        return chosen
    beside = [name for name in ("mitigation", "order") if chosen[name] is not None]
    if beside:
        raise InvalidRequestError(
            f"arrangement names method and order already; leave out {' and '.join(beside)}", param="posfix.arrangement"
        )
    reranker, order, mitigation = read_arrangement(given.arrangement)
    return chosen | {"reranker": reranker, "order": order, "mitigation": mitigation}


def mitigation_choice(given: str | MitigationInput | None) -> MitigationChoice | None:
    """Return the mitigation of a request, or None for the default."""
    if given is None or isinstance(given, str):
        return None if given is None else MitigationChoice(given)
    return MitigationChoice(given.name, given.parameters)
