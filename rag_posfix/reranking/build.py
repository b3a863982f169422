"""Creates rerankers by name. Knows the models that they may need, but no reranker."""

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

__all__ = ["RerankerModels", "build_reranker", "check_reranker", "parameters_of", "parse_reranker"]


@dataclass(frozen=True, slots=True)
class RerankerModels:
    """The models that a reranker may use. Each is a function that is called only for rerankers that need the model.

    Attributes:
        embeddings: Returns the embedding model that the index was built with.
        generator: Returns the served model.
    """

    embeddings: Callable[[], Embeddings]
    generator: Callable[[], Generator]


def build_reranker(name: str, parameters: Mapping[str, Any], models: RerankerModels) -> BaseDocumentCompressor:
    """Return the reranker called ``name``.

    A field called ``embeddings`` or ``generator`` is set from ``models``; the other fields are parameters.

    Args:
        name: A name in ``RERANKERS``.
        parameters: Parameters of the reranker.
        models: The models.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    check_reranker(name, parameters)
    kind = RERANKERS.get(name)
    needed = {name: getattr(models, name)() for name in RerankerModels.__slots__ if name in kind.model_fields}
    try:
        return kind(**needed, **parameters)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}: {where}={first.get('input')!r}: {first['msg']}") from error


def parse_reranker(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name:parameter=value`` and check the names, before a model is loaded.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or malformed text. Values are checked when the reranker is created.
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
    """Return the names of a reranker's parameters: its fields except models."""
    return tuple(field for field in kind.model_fields if field not in RerankerModels.__slots__)
