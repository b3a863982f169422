"""Metadata filters: what is accepted as one, and which metadata values count as equal."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias

from rag_posfix.errors import ConfigError

MetadataFilter: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""``{"year": 1999, "kind": ["book", "map"]}``: every field has this value, or one of these; or a function of the
metadata. True is not 1, 1 is 1.0; a field that is missing matches nothing, not even None."""

_SCALARS = (str, int, float, bool, type(None))


def check_filter(metadata_filter: object) -> None:
    """Raise for an unusable filter, before anything is searched.

    Raises:
        ConfigError: it is neither a function nor a dict of names to values or lists of values.
    """
    if callable(metadata_filter):
        return
    if not isinstance(metadata_filter, Mapping):
        raise ConfigError(
            f"filter={metadata_filter!r} is a {type(metadata_filter).__name__}; pass a dict such as {{'year': 1999}} "
            "or {'kind': ['book', 'map']}, or a function of the metadata"
        )
    for field, value in metadata_filter.items():
        if not isinstance(field, str) or not all(isinstance(item, _SCALARS) for item in _listed(value)):
            raise ConfigError(
                f"filter {field!r}: {value!r} is not understood; give a string, number, boolean or None, or a list "
                "of those that are allowed; for anything else pass a function of the metadata"
            )


def allowed_keys(value: Any) -> Iterable[Hashable]:
    """Return the ``comparison_key`` of each value that one field of a checked filter allows, each once."""
    return {comparison_key(item) for item in _listed(value)}


def comparison_key(value: Any) -> Hashable:
    """Return a key that is equal for values that count as equal; None for values that no filter can name.

    Booleans have keys of their own, because Python holds that True == 1.
    """
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, _SCALARS):
        return ("value", value)
    return None


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list | tuple | set | frozenset) else [value]
