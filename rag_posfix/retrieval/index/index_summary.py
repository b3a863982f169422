"""What an index holds: files with their passages, and fields of the metadata with the types of their values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_posfix.contracts.filters import comparison_key, comparisons, elements, field_values, parse_filter
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.index.storage import read_entries, read_manifest

EXAMPLES = 5
"""Values of a field that its summary has."""

_COUNTED_VALUES = 10_000
"""Different values of a field that are counted: the memory of a summary is bounded."""


@dataclass(frozen=True, slots=True)
class FieldSummary:
    """A field of the metadata, ``a.b`` for the field ``b`` of a dict ``a``.

    Attributes:
        passages: How many passages have a value in it.
        types: How many values of each type: text, number, boolean, other.
        distinct: How many different values, at most 10,000.
        examples: The first different values.
    """

    name: str
    passages: int
    types: Mapping[str, int]
    distinct: int
    examples: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """An index in numbers. ``files`` has the passages of each file, "" those that were read from no file."""

    embedding: str
    dimension: int
    passages: int
    files: Mapping[str, int]
    fields: tuple[FieldSummary, ...]


def summarize_index(folder: Path) -> IndexSummary:
    """Return what an index holds; no embedding model is loaded.

    Raises:
        RetrievalError: the folder has no index, or it is damaged.
    """
    manifest = read_manifest(folder)
    files: Counter[str] = Counter()
    fields: dict[str, _FieldCounts] = {}
    for entry in read_entries(folder, mmap=True).values():
        files.update(entry.files or ("",))
        for name in _field_names(entry.document.metadata):
            fields.setdefault(name, _FieldCounts()).add(field_values(entry.document.metadata, name))
    return IndexSummary(
        manifest.embedding,
        manifest.dimension,
        manifest.count,
        dict(sorted(files.items())),
        tuple(counts.summary(name) for name, counts in sorted(fields.items())),
    )


def unknown_fields(entries: Iterable[IndexEntry], metadata_filter: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the fields of a filter that no document has, and all fields that the documents have."""
    wanted = sorted({comparison.field for comparison in comparisons(parse_filter(metadata_filter))})
    known = {name for entry in entries for name in _field_names(entry.document.metadata)}
    return [name for name in wanted if name not in known], sorted(known)


class _FieldCounts:
    def __init__(self) -> None:
        self._passages = 0
        self._types: Counter[str] = Counter()
        self._values: dict[object, Any] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Count the values of one passage."""
        present = [item for value in values for item in elements(value) if item is not None]
        self._passages += bool(present)
        for item in present:
            self._types[_type_name(item)] += 1
            if len(self._values) < _COUNTED_VALUES and not isinstance(item, Mapping):
                self._values.setdefault(comparison_key(item), item)

    def summary(self, name: str) -> FieldSummary:
        examples = tuple(list(self._values.values())[:EXAMPLES])
        return FieldSummary(name, self._passages, dict(self._types), len(self._values), examples)


def _type_name(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "text"
        case _:
            return "other"


def _field_names(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that a filter may give the fields of a document, each once."""
    names: dict[str, None] = {}
    for name, value in metadata.items():
        if isinstance(name, str):
            names |= dict.fromkeys(_nested_names(name, value))
    yield from names


def _nested_names(name: str, value: object) -> Iterator[str]:
    holders = [item for item in elements(value) if isinstance(item, Mapping)]
    if not holders:
        yield name
    for holder in holders:
        for inner, inner_value in holder.items():
            yield from _nested_names(f"{name}.{inner}", inner_value)
