"""What the first rank of a model tells the others to do, as JSON: nothing that is received is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError
from rag_posfix.plan.layout import Layout, Span, Turn


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
        return json.dumps({"do": type(command).__name__, "with": command}, default=_plain).encode()
    except TypeError as error:
        name = command.mitigation.name if isinstance(command, Prefill) else type(command).__name__
        raise ConfigError(
            f"the parameters of {name} cannot be sent to the other ranks: {error}; give numbers, text, lists, None"
        ) from error


def decode(data: bytes) -> Command:
    """Return the command that ``encode`` wrote."""
    told = json.loads(data)
    kind, given = told["do"], told["with"]
    if kind == "Prefill":
        choice = MitigationChoice(given["mitigation"]["name"], given["mitigation"]["parameters"])
        return Prefill(given["session"], _layout(given["layout"]), choice, given["max_tokens"])
    if kind == "Advance":
        return Advance(**given)
    return Free(**given) if kind == "Free" else End()


def _plain(value: Any) -> dict[Any, Any]:
    """Return what JSON does not know as what it knows: parameters may be any mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{value!r} is none of JSON's types")


def _layout(given: Mapping[str, Any]) -> Layout:
    def spans(name: str) -> tuple[Span, ...]:
        return tuple(Span(**span) for span in given[name])

    relevance = given["relevance"]
    return Layout(
        token_ids=tuple(given["token_ids"]),
        prefix=Span(**given["prefix"]),
        passages=spans("passages"),
        texts=spans("texts"),
        suffix=Span(**given["suffix"]),
        question=Span(**given["question"]),
        keys=tuple(given["keys"]),
        relevance=None if relevance is None else tuple(relevance),
        turns=tuple(Turn(turn["role"], Span(**turn["content"])) for turn in given["turns"]),
    )
