"""Names of mitigations in results."""

from __future__ import annotations

import json
import re
from typing import Any

from rag_posfix.contracts.request import MitigationChoice

__all__ = ["label"]


def label(choice: MitigationChoice) -> str:
    """Return a name for a mitigation and its parameters, in the form that the command line reads."""
    return ":".join([choice.name, *(f"{key}={_written(value)}" for key, value in sorted(choice.parameters.items()))])


def _written(value: Any) -> str:
    """Return a value as JSON; plain words without quotes."""
    plain = isinstance(value, str) and re.fullmatch(r"[\w./-]+", value)
    if plain:
        try:
            json.loads(value)
        except ValueError:
            return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
