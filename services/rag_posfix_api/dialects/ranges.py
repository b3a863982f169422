"""Ranges that the pipeline checks, with status 400: the schema of a request tells them and checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["within"]


def within(**limits: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds limits to the schema of an optional number, for ``json_schema_extra``."""

    def add(schema: dict[str, Any]) -> None:
        for member in schema["anyOf"]:
            if member["type"] != "null":
                member |= limits

    return add
