"""Makes rerankers by name. Knows what they are made from, and none by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from pydantic import ValidationError

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import parse_named
from rag_posfix.errors import ConfigError
from rag_posfix.reranking import RERANKERS

__all__ = ["Parts", "build_reranker", "check_reranker", "parameters_of", "parse_reranker"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reranker may be made from. Each is a function, called only by rerankers that need it.

    Attributes:
        embeddings: Returns the embedding model that the index was built with.
        generator: Returns the served model.
    """

    embeddings: Callable[[], Embeddings]
    generator: Callable[[], Generator]


def build_reranker(name: str, parameters: Mapping[str, Any], parts: Parts) -> BaseDocumentCompressor:
    """Return the reranker called ``name``.

    A field called ``embeddings`` or ``generator`` is filled from ``parts``; the others are parameters.

    Args:
        name: A name in ``RERANKERS``.
        parameters: The reranker's own.
        parts: What it is made from.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of what is allowed.
    """
    check_reranker(name, parameters)
    kind = RERANKERS.get(name)
    made = {part: getattr(parts, part)() for part in Parts.__slots__ if part in kind.model_fields}
    try:
        return kind(**made, **parameters)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {where}={first.get('input')!r}: {first['msg']}") from error


def parse_reranker(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:parameter=value`` and check it: a typing error is told before a model is loaded.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or the text cannot be read. Values are checked when it is made.
    """
    name, parameters = parse_named(text, "reranker", "top_n=5")
    check_reranker(name, parameters)
    return name, parameters


def check_reranker(name: str, parameters: Iterable[str]) -> None:
    """Check the name of a reranker and those of its parameters.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter.
    """
    allowed = parameters_of(RERANKERS.get(name))
    for key in parameters:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name} has no parameter {key!r}.{hint} It takes: {', '.join(allowed) or 'none'}")


def parameters_of(kind: type[BaseDocumentCompressor]) -> tuple[str, ...]:
    """Return the names of a reranker's own parameters."""
    return tuple(field for field in kind.model_fields if field not in Parts.__slots__)
