"""Reads Compose files as the Compose specification has them."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest


def compose_parser() -> Any:
    """Return a function from text to a project: unknown keys and values are errors. Skips without compose-spec."""
    if importlib.util.find_spec("compose_spec") is None:
        pytest.skip("no compose-spec: it has no wheel for this platform")
    from compose_spec import PyCompose

    return PyCompose.from_yaml


def with_defaults(text: str, **variables: str) -> str:
    """Put values in place of variables as ``docker compose`` does before it parses: given, default, or ``x``."""
    return re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)\}", lambda found: variables.get(found[1]) or found[2] or "x", text)
