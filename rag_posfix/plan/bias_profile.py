"""A stored slot profile: how much attention a dummy passage got in each place, measured once. Plain numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError

__all__ = ["read_profile", "stretched"]

PROFILE_BYTES = 1 << 16


def read_profile(user: str, path: str) -> Any:
    """Return the list in a profile that ``rag-posfix probe slot-attention`` wrote; it is not checked.

    Args:
        user: Who asks, for the message.
        path: A JSON file {"profile": [...]}.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as opened:
            return json.loads(opened.read(PROFILE_BYTES))["profile"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f'{user}: profile={path!r} cannot be read; it must be a JSON file {{"profile": [...]}}, as '
            "rag-posfix probe slot-attention writes it"
        ) from error


def stretched(profile: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Return a profile for the slots of a prompt: interpolated to their number, scaled to their mean attention.

    Formula: b'_k = linear interpolation of b between its ends, at k / (N - 1); b_k = b'_k mean(measured) / mean(b').

    Args:
        profile: Two numbers or more, not all 0.
        measured: The attention in each of N slots.
    """
    n, last = len(measured), len(profile) - 1
    found = []
    for slot in range(n):
        at = slot * last / (n - 1) if n > 1 else 0.0
        low = min(int(at), last - 1)
        found.append(profile[low] + (at - low) * (profile[low + 1] - profile[low]))
    total = sum(found)
    return [value * sum(measured) / total for value in found] if total > 0 else found
