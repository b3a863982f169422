"""A method and its parameters, as data and as one line of text: ``name:parameter=value``; arrangements of methods.

Names are not looked up in a registry, and files are not read.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import check_parameters, parameters_of, shown

MAX_CHARACTERS = 1 << 16
"""A method's text, its parameters included, has at most this number of characters."""
MAX_DEPTH = 16
"""Lists and objects nest at most this deep in a parameter."""

GIVEN_ORDER = "original"
"""The order of an arrangement that names none: passages stay as they are given."""

_PAIRS = {"[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """The name of a method and its parameters: a mitigation, an order, a reranker or a first stage.

    Attributes:
        name: Its name in the registry of its kind, or an alias.
        parameters: Its parameters by name; missing ones have their defaults.
    """

    name: str = "none"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"the name of a method must be a string, got {shown(self.name)}")
        if not isinstance(self.parameters, Mapping):
            raise ConfigError(f"parameters={shown(self.parameters)} of {self.name} must be a mapping: {{name: value}}")

    @property
    def label(self) -> str:
        """Name and parameters, for ``parse_method`` to read; parameters are sorted by name."""
        pairs = sorted(self.parameters.items())
        return ":".join([self.name, *(f"{name}={_value_text(value)}" for name, value in pairs)])


class Parametrised:
    """Base of registered dataclasses whose fields are their parameters.

    ``paper`` and ``deviations`` follow from the docstring of a subclass that does not set them.

    Attributes:
        name: Name in the registry of its kind.
        paper: Where the method is from: the section ``Source``; empty if that has no address.
        deviations: The sentences of the section ``Differs from the paper``; none without a paper.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    deviations: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        source = _section(cls, "Source")
        if "paper" not in vars(cls) and "http" in source:
            cls.paper = source
        if "deviations" not in vars(cls) and cls.paper:
            cls.deviations = tuple(filter(None, re.split(r"(?<=\.) ", _section(cls, "Differs from the paper"))))

    def __post_init__(self) -> None:
        """Check types and ranges of the parameters. A subclass that checks more calls this first."""
        check_parameters(self, self.name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name."""
        return {name: getattr(self, name) for name in parameters_of(type(self))}

    @property
    def label(self) -> str:
        """Name and the parameters that differ from their defaults, as ``parse_method`` reads them."""
        defaults = parameters_of(type(self))
        changed = {name: value for name, value in self.parameters.items() if value != defaults[name].default}
        return MethodSpec(self.name, changed).label


def _section(cls: type, title: str) -> str:
    """Return a section of a docstring on one line; empty if there is none."""
    match = re.search(rf"^{title}:((?:.*\n?)(?:[ \t]+.*\n?)*)", inspect.cleandoc(cls.__doc__ or ""), re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


def parse_method(text: str, kind: str, example: str) -> MethodSpec:
    """Parse ``name`` or ``name:parameter=value:parameter=value``; a value that is valid JSON is parsed as JSON.

    A JSON list or a string in double quotes may contain colons and commas.

    Args:
        kind: The kind of method, for error messages.
        example: A parameter and its value, for error messages.

    Raises:
        ConfigError: a parameter without a value or given twice, an unclosed bracket or quote, or a text that is too
            long or nested too deeply.
    """
    name, *pairs = split_outside(text.strip(), ":")
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{shown(pair)} in {kind} {shown(text)} must be parameter=value, for example {example}")
        if key in parameters:
            raise ConfigError(f"{kind} {shown(text)} gives {shown(key)} twice; give it once")
        parameters[key] = parse_value(value)
    return MethodSpec(name, parameters)


def parse_value(text: str) -> Any:
    """Return the value of ``text`` as JSON, or ``text`` itself if it is not JSON; reject a number of many digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
    except ValueError as error:  # Python bounds the digits of whole numbers
        raise ConfigError(f"{shown(text)} has too many digits; give a shorter number") from error


def split_outside(text: str, separator: str) -> list[str]:
    """Split ``text`` at each ``separator`` that is outside of JSON brackets, braces and double quotes.

    Raises:
        ConfigError: a bracket, brace or quote is not closed, or the text is too long or nested too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{shown(text)} has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    items, start = [], 0
    expected: list[str] = []  # the closing characters of open brackets and of an open quote
    characters = iter(enumerate(text))
    for index, character in characters:
        if expected[-1:] == ['"']:
            if character == "\\":
                next(characters, None)
            elif character == '"':
                expected.pop()
        elif character == '"' or character in _PAIRS:
            expected.append(_PAIRS.get(character, '"'))
            if len(expected) > MAX_DEPTH:
                raise ConfigError(f"{shown(text)} nests more than {MAX_DEPTH} lists and objects; write it flatter")
        elif character in _PAIRS.values():
            if expected[-1:] != [character]:
                raise ConfigError(f"{shown(text)} has a {character} that closes nothing; write values as JSON")
            expected.pop()
        elif character == separator and not expected:
            items.append(text[start:index])
            start = index + 1
    if expected:
        raise ConfigError(f"{shown(text)} lacks a closing {expected[-1]}; write values as JSON, quoted for the shell")
    return [*items, text[start:]]


def read_reranker(text: str) -> MethodSpec:
    """Read ``name`` or ``name:parameter=value``; ``first+second`` is ``fused`` with these two scorers.

    Raises:
        ConfigError: text that cannot be read.
    """
    spec = parse_method(text.removeprefix("fused:") if "+" in text else text, "reranker", "top_n=5")
    if "+" not in spec.name:
        return spec
    return MethodSpec("fused", {"scorers": spec.name.split("+"), **spec.parameters})


def named_method(method: str | MethodSpec, kind: str) -> MethodSpec:
    """Return the method that a text, or a ``MethodSpec``, names; the name is not looked up.

    Args:
        kind: ``mitigation``, ``order`` or ``reranker``.

    Raises:
        ConfigError: text that cannot be read, or a value that is neither.
    """
    if isinstance(method, MethodSpec):
        return method
    if not isinstance(method, str) or not method.strip():
        raise ConfigError(f"{kind}={shown(method)} must be name or name:parameter=value")
    if kind == "reranker":
        return read_reranker(method)
    return parse_method(method, kind, "base=reverse" if kind == "order" else "experts=5")


def read_arrangement(text: str) -> tuple[MethodSpec | None, str, MethodSpec]:
    """Return reranker, order and mitigation of an arrangement.

    A bare method keeps the default reranker and order: None and ``GIVEN_ORDER``.

    Raises:
        ConfigError: two parts or more than three, or a part that cannot be read.
    """
    specs = [spec.strip() for spec in split_outside(text, "/")]
    if len(specs) not in (1, 3) or not specs[-1]:
        raise ConfigError(
            f"arrangement {text[:200]!r} must be reranker/order/method, for example "
            "likelihood+embedding/reverse/none, or a method alone; put values with slashes into double quotes"
        )
    mitigation = parse_method(specs[-1], "mitigation", "experts=5")
    if len(specs) == 1:
        return None, GIVEN_ORDER, mitigation
    return read_reranker(specs[0]) if specs[0] else None, specs[1] or GIVEN_ORDER, mitigation


def _value_text(value: Any) -> str:
    """Return a value as JSON; a plain word that is not JSON is written without quotes."""
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
