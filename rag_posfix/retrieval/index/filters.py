"""What a metadata filter is, and which documents it lets through. Knows nothing of vectors or questions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias

from rag_posfix.errors import ConfigError

__all__ = ["MetadataFilter", "allowed_values", "check_filter", "fold"]

MetadataFilter: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""``{"year": 1999, "kind": ["book", "map"]}``: every field has this value, or one of these; or a function of the
metadata. True is not 1, 1 is 1.0; a field that is missing matches nothing, not even None."""

_SCALARS = (str, int, float, bool, type(None))


def check_filter(chosen: object) -> None:
    """Refuse what is no filter, before anything is searched.

    Raises:
        ConfigError: neither a function nor a dict of names to values or lists of values.
    """
    if callable(chosen):
        return
    if not isinstance(chosen, Mapping):
        raise ConfigError(
            f"filter={chosen!r} is a {type(chosen).__name__}; pass a dict such as {{'year': 1999}} or "
            "{'kind': ['book', 'map']}, or a function of the metadata"
        )
    for field, value in chosen.items():
        values = value if isinstance(value, list | tuple | set | frozenset) else [value]
        if not isinstance(field, str) or not all(isinstance(item, _SCALARS) for item in values):
            raise ConfigError(
                f"filter {field!r}: {value!r} is not understood; give a string, number, boolean or None, or a list "
                "of those that are allowed; for anything else pass a function of the metadata"
            )


def allowed_values(value: Any) -> Iterable[Hashable]:
    """Return the folded values that a field of a checked filter lets through, each once."""
    values = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return {fold(item) for item in values}


def fold(value: Any) -> Hashable:
    """Return a key that is equal for values that count as equal; None for what no filter can name.

    A boolean gets a key of its own because Python holds that True == 1.
    """
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, _SCALARS):
        return ("value", value)
    return None
