"""Makes rerankers by name. Knows what they are made from, and none by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec, parse_method
from rag_posfix.reranking import RERANKERS

__all__ = ["Parts", "build_reranker", "parse_reranker"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reranker may be made from. Each is a function, called only by rerankers that need it.

    Attributes:
        embeddings: Returns the embedding model that the index was built with.
        generator: Returns the served model.
    """

    embeddings: Callable[[], Embeddings]
    generator: Callable[[], Generator]


def build_reranker(spec: MethodSpec, parts: Parts) -> BaseDocumentCompressor:
    """Return the reranker that ``spec`` asks for.

    A field called ``embeddings`` or ``generator`` is filled from ``parts``; the others are parameters.

    Args:
        spec: A name in ``RERANKERS`` and parameters.
        parts: What it is made from.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of what is allowed.
    """
    made: BaseDocumentCompressor = RERANKERS.create(
        spec, {"embeddings": parts.embeddings, "generator": parts.generator}
    )
    return made


def parse_reranker(text: str) -> MethodSpec:
    """Read ``name`` or ``name:parameter=value`` and check it: a typing error is told before a model is loaded.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, a value outside of what is allowed, or text that cannot be read.
    """
    spec = parse_method(text, "reranker", "top_n=5")
    RERANKERS.check(spec)
    return spec
