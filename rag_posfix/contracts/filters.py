"""Filters by metadata: a small language in langchain's dict form, its check, and its evaluation on one document.

``{"year": {"$gte": 1999}, "kind": ["book", "map"]}``: the conditions of a dict hold together.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from rag_posfix.errors import ConfigError

Scalar: TypeAlias = str | int | float | bool | None
Range: TypeAlias = Literal["$gt", "$gte", "$lt", "$lte"]

RANGES: Final = ("$gt", "$gte", "$lt", "$lte")
COMPARISONS: Final = ("$eq", "$ne", "$in", "$nin", *RANGES, "$exists")
COMBINATIONS: Final = ("$and", "$or", "$not")

MAX_CONDITIONS: Final = 100
"""Comparisons in one filter."""
MAX_ALLOWED: Final = 10_000
"""Values in all lists of one filter."""
MAX_NESTING: Final = 32
"""Levels of ``$and``, ``$or`` and ``$not``."""

_EXAMPLE = '{"year": {"$gte": 1999}, "kind": ["book", "map"]}'


@dataclass(frozen=True, slots=True)
class OneOf:
    """The field has one of the values; of a field with a list, an element has."""

    field: str
    values: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class InRange:
    """The field is a number or text on this side of ``bound``, which is of the same type."""

    field: str
    operator: Range
    bound: str | int | float


@dataclass(frozen=True, slots=True)
class Exists:
    """The field is present, and neither None nor an empty list."""

    field: str


@dataclass(frozen=True, slots=True)
class Negation:
    """The condition does not hold: also for documents without its field."""

    condition: Condition


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every condition holds; true without any."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """A condition holds."""

    conditions: tuple[Condition, ...]


Condition: TypeAlias = OneOf | InRange | Exists | Negation | AllOf | AnyOf


def parse_filter(metadata_filter: object) -> Condition:
    """Return the condition that a filter states.

    A field has a value, a list of allowed values, or a dict of ``$eq``, ``$ne``, ``$in``, ``$nin``, ``$gt``, ``$gte``,
    ``$lt``, ``$lte`` and ``$exists``; ``$and`` and ``$or`` take a list of filters, ``$not`` takes a filter. True is
    not 1, 1 is 1.0, and text is compared with text only. A field with a list matches if one of its elements does.
    ``a.b`` is the field ``b`` of the dict ``a``, or of dicts in a list, where no field has that name. A missing field
    matches no comparison; ``$ne``, ``$nin`` and ``$not`` are the complements of theirs, and match it.

    Raises:
        ConfigError: it is no filter, or is larger than the limits of this module.
    """
    condition = _parse_dict(metadata_filter, "filter", 0)
    stated = list(comparisons(condition))
    n_values = sum(len(comparison.values) for comparison in stated if isinstance(comparison, OneOf))
    for number, limit, what in (
        (len(stated), MAX_CONDITIONS, "conditions"),
        (n_values, MAX_ALLOWED, "allowed values"),
    ):
        if number > limit:
            raise ConfigError(f"filter has {number} {what}, at most {limit} are allowed; write a shorter one")
    return condition


def read_filter(text: str) -> Mapping[str, Any]:
    """Return the filter of a command line: a JSON object, or ``FIELD=VALUE`` for equality.

    Raises:
        ConfigError: it is neither, or no filter.
    """
    field, equals, value = text.partition("=")
    try:
        if not text.lstrip().startswith("{") and equals and field.strip():
            metadata_filter: Any = {field.strip(): _json_or_text(value)}
        else:
            metadata_filter = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"filter {text[:200]!r} must be FIELD=VALUE or JSON such as {_EXAMPLE}") from error
    parse_filter(metadata_filter)
    return dict(metadata_filter)


def combine_filters(*filters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a filter that matches what all ``filters`` match; None if none is given."""
    present = [metadata_filter for metadata_filter in filters if metadata_filter]
    return {"$and": present} if len(present) > 1 else present[0] if present else None


def filter_key(metadata_filter: Mapping[str, Any] | None) -> str:
    """Return text that is different for different filters, "" without one; the order of fields is not part of it."""
    return "" if not metadata_filter else repr(_sorted(_parse_dict(metadata_filter, "filter", 0)))


def matches(condition: Condition, metadata: Mapping[str, Any]) -> bool:
    """Return whether a document with this metadata meets a condition: the definition that every store follows."""
    match condition:
        case AllOf(conditions):
            return all(matches(member, metadata) for member in conditions)
        case AnyOf(conditions):
            return any(matches(member, metadata) for member in conditions)
        case Negation(negated):
            return not matches(negated, metadata)
        case Exists(field):
            return any(map(has_value, field_values(metadata, field)))
        case OneOf(field, values):
            allowed = {comparison_key(value) for value in values}
            return any(comparison_key(item) in allowed for item in _field_elements(metadata, field))
        case InRange(field):
            return any(in_range(condition, item) for item in _field_elements(metadata, field))


def field_values(metadata: Mapping[str, Any], field: str) -> Iterator[Any]:
    """Yield the value of a field; where none has the name ``a.b``, ``b`` of the dict ``a`` or of dicts in a list."""
    if field in metadata:
        yield metadata[field]
        return
    for dot in (index for index, character in enumerate(field) if character == "."):
        for holder in elements(metadata.get(field[:dot])):
            if isinstance(holder, Mapping):
                yield from field_values(holder, field[dot + 1 :])


def _field_elements(metadata: Mapping[str, Any], field: str) -> Iterator[object]:
    for value in field_values(metadata, field):
        yield from elements(value)


def comparison_key(value: object) -> tuple[str, object]:
    """Return a key that is equal for equal values: Python holds that True == 1. Other types than ``Scalar`` have one.

    The key of other types is never that of a value in a filter.
    """
    if isinstance(value, bool):
        return "boolean", value
    return ("value", value) if isinstance(value, str | int | float | None) else ("other", None)


def elements(value: object) -> Iterable[object]:
    """Return the values that a field is compared by: the elements of a list, or the value itself."""
    return value if isinstance(value, list | tuple | set | frozenset) else (value,)


def has_value(value: object) -> bool:
    """Return whether a field with this value exists."""
    return value is not None and not (isinstance(value, list | tuple | set | frozenset) and not value)


def in_range(condition: InRange, value: object) -> bool:
    """Return whether a value is of the bound's type and on the right side of it."""
    bound: Any = condition.bound
    comparable = isinstance(value, str) if isinstance(bound, str) else _is_number(value)
    if not comparable:
        return False
    number: Any = value
    match condition.operator:
        case "$gt":
            return bool(number > bound)
        case "$gte":
            return bool(number >= bound)
        case "$lt":
            return bool(number < bound)
        case "$lte":
            return bool(number <= bound)


def _parse_dict(value: object, path: str, depth: int) -> Condition:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}={_shown(value)} is a {type(value).__name__}; pass a dict such as {_EXAMPLE}")
    if depth > MAX_NESTING:
        raise ConfigError(f"filter nests $and, $or and $not more than {MAX_NESTING} levels deep; write it flatter")
    conditions: list[Condition] = []
    for name, operand in value.items():
        if name in COMBINATIONS:
            conditions.append(_parse_combination(name, operand, f"{path}.{name}", depth))
        elif not isinstance(name, str) or name.startswith("$"):
            raise ConfigError(
                f"{path}: {name!r} is not understood; give the name of a field, or one of {', '.join(COMBINATIONS)}"
            )
        else:
            conditions.extend(_parse_field(name, operand, path))
    return conditions[0] if len(conditions) == 1 else AllOf(tuple(conditions))


def _parse_combination(name: str, operand: object, path: str, depth: int) -> Condition:
    if name == "$not":
        return Negation(_parse_dict(operand, path, depth + 1))
    if not isinstance(operand, list | tuple) or not operand:
        raise ConfigError(f"{path}: {_shown(operand)} is not understood; give a list of one or more filters")
    members = tuple(_parse_dict(member, f"{path}[{index}]", depth + 1) for index, member in enumerate(operand))
    return AllOf(members) if name == "$and" else AnyOf(members)


def _parse_field(field: str, operand: object, path: str) -> Iterable[Condition]:
    if not isinstance(operand, Mapping):
        yield OneOf(field, _scalars(field, elements(operand), path))
        return
    if not operand:
        raise ConfigError(f"{path} {field!r}: {{}} is not understood; give a value or one of {', '.join(COMPARISONS)}")
    for operator, value in operand.items():
        yield _parse_comparison(field, operator, value, path)


def _parse_comparison(field: str, operator: object, value: object, path: str) -> Condition:
    where = f"{path} {field!r}: {operator}"
    match operator:
        case "$eq" | "$ne":
            same = OneOf(field, _scalars(field, [value], path))
            return same if operator == "$eq" else Negation(same)
        case "$in" | "$nin":
            if not isinstance(value, list | tuple | set | frozenset):
                raise ConfigError(f"{where}={_shown(value)} must be a list of values")
            within = OneOf(field, _scalars(field, value, path))
            return within if operator == "$in" else Negation(within)
        case "$exists":
            if not isinstance(value, bool):
                raise ConfigError(f"{where}={_shown(value)} must be true or false")
            return Exists(field) if value else Negation(Exists(field))
        case "$gt" | "$gte" | "$lt" | "$lte":
            value = plain_scalar(value)
            if not (isinstance(value, str) or _is_number(value)):
                raise ConfigError(f"{where}={_shown(value)} must be a finite number or a text")
            return InRange(field, operator, value)  # type: ignore[arg-type]  # checked above
    raise ConfigError(f"{path} {field!r}: {_shown(operator)} is not understood; use one of {', '.join(COMPARISONS)}")


def plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy as a value of Python; other values as they are."""
    numpy = sys.modules.get("numpy")  # there is no scalar of it before it is imported
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _scalars(field: str, values: Iterable[object], path: str) -> tuple[Scalar, ...]:
    scalars: dict[tuple[str, object], Scalar] = {}
    for value in map(plain_scalar, values):
        if not (value is None or isinstance(value, str | bool) or _is_number(value)):
            raise ConfigError(
                f"{path} {field!r}: {_shown(value)} is not understood; give text, a finite number, a boolean or None, "
                "or a list of those that are allowed"
            )
        scalars[comparison_key(value)] = value
    return tuple(scalars.values())


def comparisons(condition: Condition) -> Iterable[OneOf | InRange | Exists]:
    """Yield the comparisons of a condition with one field each."""
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            for member in conditions:
                yield from comparisons(member)
        case Negation(negated):
            yield from comparisons(negated)
        case _:
            yield condition


def _sorted(condition: Condition) -> Condition:
    """Return an equivalent condition that does not depend on the order of fields and values."""
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            return type(condition)(tuple(sorted((_sorted(member) for member in conditions), key=repr)))
        case Negation(negated):
            return Negation(_sorted(negated))
        case OneOf(field, values):
            return OneOf(field, tuple(sorted(values, key=repr)))
        case _:
            return condition


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def conjuncts(condition: Condition) -> Sequence[Condition]:
    """Return conditions that hold together exactly if ``condition`` does."""
    if isinstance(condition, AllOf):
        return [part for member in condition.conditions for part in conjuncts(member)]
    return [condition]
