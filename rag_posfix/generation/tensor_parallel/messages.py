"""What the first rank of a model tells the others to do, as JSON: nothing that is received is ever unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span

__all__ = ["Advance", "Command", "End", "Free", "Prefill", "decode", "encode"]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prefill a prompt: opens a session.

    Attributes:
        session: Number that the session is called by from now on.
        layout: The prompt.
        mitigation: How it is read.
        max_tokens: Tokens that may be generated after it.
    """

    session: int
    layout: Layout
    mitigation: MitigationChoice
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Advance:
    """Append a token to a session."""

    session: int
    token: int


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a session."""

    session: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop following."""


Command: TypeAlias = Prefill | Advance | Free | End


def encode(command: Command) -> bytes:
    """Return a command as JSON.

    Raises:
        ConfigError: a parameter of the mitigation is none of JSON's types.
    """
    try:
        return orjson.dumps({"do": type(command).__name__, "with": command}, default=_plain)
    except TypeError as error:
        name = command.mitigation.name if isinstance(command, Prefill) else type(command).__name__
        raise ConfigError(
            f"the parameters of {name} cannot be sent to the other ranks: {error}; give numbers, text, lists, None"
        ) from error


def decode(data: bytes) -> Command:
    """Return the command that ``encode`` wrote."""
    told = orjson.loads(data)
    kind, fields = told["do"], told["with"]
    if kind == "Prefill":
        choice = MitigationChoice(fields["mitigation"]["name"], fields["mitigation"]["parameters"])
        return Prefill(fields["session"], _layout(fields["layout"]), choice, fields["max_tokens"])
    if kind == "Advance":
        return Advance(**fields)
    return Free(**fields) if kind == "Free" else End()


def _plain(value: Any) -> dict[Any, Any]:
    """Return what orjson does not know as what it knows: parameters may be any mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is none of JSON's types")


def _layout(fields: Mapping[str, Any]) -> Layout:
    def spans(name: str) -> tuple[Span, ...]:
        return tuple(Span(**span) for span in fields[name])

    relevance = fields["relevance"]
    return Layout(
        token_ids=tuple(fields["token_ids"]),
        prefix=Span(**fields["prefix"]),
        passages=spans("passages"),
        texts=spans("texts"),
        suffix=Span(**fields["suffix"]),
        question=Span(**fields["question"]),
        keys=tuple(fields["keys"]),
        relevance=None if relevance is None else tuple(relevance),
    )
