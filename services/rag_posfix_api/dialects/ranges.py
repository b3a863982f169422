"""Rules that the parsers and the pipeline check, with status 400: the schema of a request tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["VISIBLE", "needs", "within"]

VISIBLE: Final = {"pattern": r"\S"}
"""A text with at least one visible character, for ``json_schema_extra``."""


def within(**limits: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds limits to the schema of an optional number, for ``json_schema_extra``."""

    def add(schema: dict[str, Any]) -> None:
        for member in schema["anyOf"]:
            if member["type"] != "null":
                member |= limits

    return add


def needs(name: str, value: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that makes a field of an object required, for ``json_schema_extra`` of a model.

    Args:
        name: The field, which the model itself need not require: the parser names what is wrong with it.
        value: The schema of its value.
    """

    def add(schema: dict[str, Any]) -> None:
        schema["properties"][name] = value
        schema["required"] = sorted({*schema.get("required", ()), name})

    return add
