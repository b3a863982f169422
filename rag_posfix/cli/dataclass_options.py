"""Commands whose options are the fields of a dataclass: names, types, ranges and defaults are written once."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rag_posfix.parameters import Integer, parameters_of


def with_options_of(cls: type[Any], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command whose parameter ``name`` is made from an option per field of ``cls``.

    The help of an option is what the docstring of ``cls`` says of the field.

    Args:
        cls: A dataclass that checks its values itself.
    """
    options = _options(cls)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in options}
            function(**given, **{name: cls(**{key: one for key, one in values.items() if one is not None})})

        parameters = []
        for one in inspect.signature(function, eval_str=True).parameters.values():
            parameters += options if one.name == name else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def _options(cls: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(cls, include_extras=True)
    texts = _texts(cls)
    made = []
    for name, parameter in parameters_of(cls).items():
        hint = hints[name]
        plain = hint.__origin__ if typing.get_origin(hint) is Annotated else hint
        ranges = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Integer)]
        limits: dict[str, Any] = {"min": ranges[0].low} if ranges else {}
        stated: Any = "chosen by the command" if parameter.default is None else True
        kind, text = plain, texts[name]
        if typing.get_origin(plain) is typing.Literal:
            kind, text = str, f"{text} One of: {', '.join(typing.get_args(plain))}."
        option: Any = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=stated, **limits)
        made.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=parameter.default
            )
        )
    return made


def _texts(cls: type[Any]) -> dict[str, str]:
    """Return what the docstring says of each field."""
    described = re.split(r"\n(?:Args|Attributes):\n", inspect.getdoc(cls) or "")[-1]
    found = re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", described, re.MULTILINE)
    return {one.group(1): " ".join(one.group(2).replace("``", "").split()) for one in found}
