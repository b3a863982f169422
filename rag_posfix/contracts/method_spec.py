"""A method and its parameters in one line of text: ``name:parameter=value``. Knows no method."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rag_posfix.errors import ConfigError

__all__ = ["format_named", "parse_named", "split_outside"]

_PAIRS = {"[": "]", "{": "}"}


def split_outside(text: str, separator: str) -> list[str]:
    """Split at ``separator`` where it stands outside of brackets, braces and double quotes, as JSON nests them.

    Raises:
        ConfigError: a bracket, brace or quote has no partner.
    """
    parts, start = [], 0
    expected: list[str] = []  # what closes the brackets and the quote that are open
    at = iter(enumerate(text))
    for index, character in at:
        if expected[-1:] == ['"']:
            if character == "\\":
                next(at, None)
            elif character == '"':
                expected.pop()
        elif character == '"' or character in _PAIRS:
            expected.append(_PAIRS.get(character, '"'))
        elif character in _PAIRS.values():
            if expected[-1:] != [character]:
                raise ConfigError(f"{text!r} has a {character} that closes nothing; write values as JSON")
            expected.pop()
        elif character == separator and not expected:
            parts.append(text[start:index])
            start = index + 1
    if expected:
        raise ConfigError(f"{text!r} lacks a closing {expected[-1]}; write values as JSON, quoted for the shell")
    return [*parts, text[start:]]


def parse_named(text: str, kind: str, example: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:parameter=value:parameter=value``; values are JSON where they parse as JSON.

    A value may be a JSON list or text in double quotes, which may hold colons and commas.

    Args:
        text: What was written.
        kind: What is named, for messages.
        example: A parameter and its value, for messages.

    Raises:
        ConfigError: a parameter without a value, or a bracket or quote without its partner.
    """
    name, *pairs = split_outside(text.strip(), ":")
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{pair!r} in {kind} {text!r} must be parameter=value, for example {example}")
        try:
            parameters[key] = json.loads(value)
        except json.JSONDecodeError:
            parameters[key] = value
    return name, parameters


def format_named(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the text that ``parse_named`` reads as this name and these parameters, which are sorted by name.

    Args:
        name: Of a method.
        parameters: Its parameters, JSON values.
    """
    return ":".join([name, *(f"{key}={_format_value(value)}" for key, value in sorted(parameters.items()))])


def _format_value(value: Any) -> str:
    """Return a value as JSON; a plain word that is no JSON itself stays without quotes."""
    if isinstance(value, str) and re.fullmatch(r"[\w./-]+", value):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
