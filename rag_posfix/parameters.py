"""Parameters of methods: names, types, ranges, and checks of values.

A method is a class whose fields are its parameters: a frozen dataclass, checked here, or a pydantic model. The type of
a field, with one of the ranges below for numbers, defines the allowed values and the error message:

    fraction: Annotated[float, Number(0, 1)] = 0.15
    experts: Annotated[int | None, Integer(1)] = None
    choose: Literal["deviation", "first"] = "deviation"
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rag_posfix.errors import ConfigError
from rag_posfix.text import hide_passwords

_KEY_OF_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|secret|password|sig)[\w.-]*=)[^&#\s'\"]+", re.IGNORECASE)

SHOWN_CHARACTERS = 200
"""A value is quoted in messages up to this length."""

_LARGEST = sys.float_info.max


class InvalidValueError(ValueError):
    """A parameter does not accept a value; the text has name, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number from ``low`` to ``high``.

    Attributes:
        low: The smallest number.
        high: The largest number.
        exclusive_min: Whether ``low`` itself is not allowed.
    """

    low: float = -_LARGEST
    high: float = _LARGEST
    exclusive_min: bool = False

    @property
    def allowed(self) -> str:
        """Description of the allowed values, for messages."""
        return self._within("a number")

    def _within(self, kind: str) -> str:
        if self.exclusive_min:
            return f"{kind} above {self.low:g} and at most {self.high:g}"
        if (self.low, self.high) == (-_LARGEST, _LARGEST):
            return kind.replace("number", "finite number")
        return f"{kind} between {self.low:g} and {self.high:g}"

    def check(self, value: Any) -> Any:
        """Return ``value`` in the form that methods store, here a float, or raise."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise InvalidValueError
        if self.exclusive_min and value == self.low:
            raise InvalidValueError
        return float(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return how pydantic checks a field with this range: as that of a dataclass, with the same message."""
        from pydantic import BeforeValidator  # only models of pydantic come here

        parameter: Any = _parameter(handler.field_name or "value", typing.Annotated[source, self], None)
        return BeforeValidator(parameter.check).__get_pydantic_core_schema__(source, handler)


@dataclass(frozen=True, slots=True)
class Integer(Number):
    """A whole number of at least ``low``, and at most ``high`` where that is given."""

    @property
    def allowed(self) -> str:
        """Description of the allowed values, for messages."""
        limits = f">= {self.low}" if self.high == _LARGEST else f"from {self.low} to {self.high}"
        return f"a whole number {limits}"

    def check(self, value: Any) -> int:
        """Return ``value``, or raise."""
        Number.check(self, value)
        if not isinstance(value, int):
            raise InvalidValueError
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberList(Number):
    """A list of numbers from ``low`` to ``high``, stored as a tuple.

    Attributes:
        min_length: The smallest length.
        max_length: The largest length.
        nonzero: Whether at least one number must differ from 0.
    """

    min_length: int
    max_length: int
    nonzero: bool = False

    @property
    def allowed(self) -> str:
        """Description of the allowed values, for messages."""
        numbers = self._within(f"a list of {self.min_length} to {self.max_length} numbers")
        return f"{numbers}, not all of them 0" if self.nonzero else numbers

    def check(self, value: Any) -> tuple[float, ...]:
        """Return ``value`` as a tuple of floats, or raise."""
        if not isinstance(value, list | tuple) or not self.min_length <= len(value) <= self.max_length:
            raise InvalidValueError
        numbers = []
        for index, number in enumerate(value):
            try:
                numbers.append(Number.check(self, number))
            except InvalidValueError:
                raise InvalidValueError(f"[{index}]={shown(number)} must be {self._within('a number')}") from None
        if self.nonzero and not any(numbers):
            raise InvalidValueError
        return tuple(numbers)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a method.

    Attributes:
        name: Its name.
        type: Its Python type as text.
        default: Its default; ``inspect.Parameter.empty`` if it is required.
        allowed: Description of the allowed values; "" if the class checks it.
        check: Returns a value in the form that the method stores, or raises; None if the class checks it.
    """

    name: str
    type: str
    default: Any
    allowed: str = ""
    check: Callable[[Any], Any] | None = None


def parameters_of(cls: Any) -> Mapping[str, Parameter]:
    """Return the parameters of a method by name, in the order of its fields.

    Args:
        cls: A dataclass, or a pydantic model.
    """
    return _parameters_of(cls)


@functools.cache
def _parameters_of(cls: Any) -> Mapping[str, Parameter]:
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = [field for field in dataclasses.fields(cls) if field.init]
        return {field.name: _parameter(field.name, hints[field.name], _default(field)) for field in fields}
    return {
        name: _parameter(name, typing.Annotated[info.annotation, *info.metadata, None], _pydantic_default(info))
        for name, info in getattr(cls, "model_fields", {}).items()
    }


def check_parameters(method: Any, label: str) -> None:
    """Check the parameters of a dataclass, and store each in its normal form; for ``__post_init__``.

    Raises:
        ConfigError: a value has another type than the parameter, or is out of range.
    """
    for name, parameter in parameters_of(type(method)).items():
        if parameter.check is None:
            continue
        try:
            object.__setattr__(method, name, parameter.check(getattr(method, name)))
        except InvalidValueError as error:
            raise ConfigError(f"{label}: {error}") from None


def check_fields(model: Any, values: Mapping[str, Any]) -> None:
    """Check values against the fields of a pydantic model, without creating an instance.

    Types and ranges are checked, not the model's own validators.

    Raises:
        ValidationError: a value has another type than the field, or is out of range.
    """
    from pydantic import create_model  # only models of pydantic come here

    fields: dict[str, Any] = {
        name: (info.annotation, info) for name, info in model.model_fields.items() if name in values
    }
    create_model("Parameters", __config__=model.model_config, **fields)(**values)


@contextmanager
def convert_pydantic_errors(
    label: str, describe: Callable[[tuple[int | str, ...], str], str] | None = None
) -> Iterator[None]:
    """Convert a validation error of pydantic to a ``ConfigError`` of one line about the first wrong value.

    Args:
        describe: Returns the text of field and value in place of ``label: field=value``, from the path to the field
            and the value as it is quoted.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        errors = getattr(error, "errors", None)
        if not callable(errors):
            raise
        first = errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):  # a validator's own; pydantic wraps every ValueError
            raise cause from None
        if isinstance(cause, InvalidValueError):
            raise ConfigError(f"{label}: {cause}") from None
        where, value = ".".join(str(key) for key in first["loc"]), shown(first.get("input"))
        if first["type"] == "missing":
            raise ConfigError(f"{label} needs {where}; pass {where}=...") from error
        place = f"{label}: {where}={value}" if describe is None else describe(first["loc"], value)
        message = first["msg"].partition(", unable to parse")[0]
        message = f": {message}".replace(": Input should be ", " must be ")
        raise ConfigError(f"{place}{message}") from error


def shown(value: Any) -> str:
    """Return ``value`` as quoted in error messages, without passwords and keys of URLs."""
    text = repr(value)
    quoted = text[:SHOWN_CHARACTERS]
    if len(text) > SHOWN_CHARACTERS:
        head, slashes, tail = quoted.rpartition("//")
        if slashes and "@" not in tail and "@" in text[SHOWN_CHARACTERS:]:  # the cut is in what may be a password
            quoted = head + slashes
        quoted += "..."
    return _KEY_OF_QUERY.sub(r"\1...", hide_passwords(quoted))


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    ranges = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Number)]
    plain = hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint
    union = isinstance(plain, types.UnionType) or typing.get_origin(plain) is typing.Union
    members = typing.get_args(plain) if union else (plain,)
    checks: list[Callable[[Any], Any]] = []
    allowed: list[str] = []
    for member in members:
        if member is type(None):
            names: tuple[Any, ...] = (None,)
        elif typing.get_origin(member) is Literal:
            names = typing.get_args(member)
        elif ranges:
            checks.append(ranges[0].check)
            allowed.append(ranges[0].allowed)
            continue
        elif member is bool:
            names = (True, False)
        else:  # no range: the class checks it
            return Parameter(name, _type_text(plain), default)
        checks.append(functools.partial(_one_of, names))
        allowed.append("true or false" if member is bool else _alternatives(names))
    text = ", or ".join(allowed)
    return Parameter(name, _type_text(plain), default, text, functools.partial(_check, name, checks, text))


def _alternatives(names: tuple[Any, ...]) -> str:
    quoted = [repr(name) for name in names]
    return f"one of {', '.join(quoted)}" if len(quoted) > 2 else " or ".join(quoted)


def _check(name: str, checks: list[Callable[[Any], Any]], allowed: str, value: Any) -> Any:
    """Return the result of the first check that accepts ``value``."""
    entry = ""
    for check in checks:
        try:
            return check(value)
        except InvalidValueError as error:
            entry = entry or str(error)
    numbers = re.fullmatch(r"\s*-?[\d.]+(?:\s*,\s*-?[\d.]+)*\s*", str(value)) if allowed.startswith("a list") else None
    form = f"; write {name}=[{numbers[0].strip()}]" if numbers else ""  # numbers that were given without brackets
    raise InvalidValueError(name + (entry or f"={shown(value)} must be {allowed}{form}"))


def _one_of(values: tuple[Any, ...], value: Any) -> Any:
    for allowed in values:
        if type(allowed) is type(value) and allowed == value:
            return allowed
    raise InvalidValueError


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty


def _pydantic_default(field: Any) -> Any:
    return inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)


def _type_text(hint: Any) -> str:
    """Return a type as Python source text."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        return hint.__name__ if hint is not type(None) else "None"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join(_type_text(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Annotated:
        return _type_text(hint.__origin__)
    return str(hint).replace("typing.", "")
