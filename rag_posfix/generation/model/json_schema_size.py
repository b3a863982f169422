"""Limits of JSON schemas: what compiles within a fraction of a second.

llguidance takes time quadratic in the properties of an object, and multiplies the alternatives of an ``allOf`` out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rag_posfix.errors import ConfigError

MAX_CHARACTERS: Final = 65_536
MAX_PROPERTIES: Final = 1000
"""Properties of all objects together."""
MAX_ENUM_VALUES: Final = 5000
"""Values of all enumerations together."""
MAX_COMBINATIONS: Final = 256
"""Combinations of the alternatives that have to hold together."""

_MANY = 1_000_000
_UNIONS = ("anyOf", "oneOf")


def check_size(schema: Any, characters: int) -> None:
    """Raise ``ConfigError`` if a schema, parsed from a text of ``characters``, exceeds a limit. Cost: linear."""
    _check("characters", characters, MAX_CHARACTERS)
    objects = [node for node in _nodes(schema) if isinstance(node, dict)]
    names = ("properties", "patternProperties", "$defs", "definitions")
    _check("properties", sum(_size(node, name, dict) for node in objects for name in names), MAX_PROPERTIES)
    _check("values of enumerations", sum(_size(node, "enum", list) for node in objects), MAX_ENUM_VALUES)
    known: dict[int, int] = {}
    most = max((_combinations(node, schema, known) for node in objects), default=1)
    _check("combinations of alternatives", most, MAX_COMBINATIONS)


def _check(of: str, count: int, most: int) -> None:
    if count > most:
        number = str(count) if count < _MANY else "over a million"
        raise ConfigError(f"the JSON schema has {number} {of}, at most {most} are allowed; ask for less in one answer")


def _nodes(schema: Any) -> Iterator[Any]:
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def _size(node: dict[str, Any], name: str, kind: type[dict[str, Any] | list[Any]]) -> int:
    value = node.get(name)
    return len(value) if isinstance(value, kind) else 0


def _combinations(node: Any, root: Any, known: dict[int, int]) -> int:
    """Return how many schemas without alternatives a schema becomes: products of what has to hold together.

    Beyond ``_MANY`` nothing is counted.
    """
    if not isinstance(node, dict):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # of a schema that refers to itself
        joined = node["allOf"] if _size(node, "allOf", list) else []
        factors = [_combinations(member, root, known) for member in joined]
        unions = [node[name] for name in _UNIONS if _size(node, name, list)]
        factors += [sum(_combinations(member, root, known) for member in union) for union in unions]
        if isinstance(node.get("$ref"), str):
            factors.append(_combinations(_resolved(node["$ref"], root), root, known))
        for factor in factors:
            known[id(node)] = min(known[id(node)] * factor, _MANY)
    return known[id(node)]


def _resolved(reference: str, root: Any) -> Any:
    """Return what a reference within the schema means; None for any other."""
    node = root
    for step in reference.removeprefix("#").split("/")[1:]:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node if reference.startswith("#") else None
