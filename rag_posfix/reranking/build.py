"""Creates rerankers by name. Knows the models that they may need, but no reranker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec, read_reranker
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.endpoint import JsonServer, no_connection


@dataclass(frozen=True, slots=True)
class RerankerModels:
    """The models that a reranker may use. Each is a function that is called only for rerankers that need the model.

    Attributes:
        embeddings: Returns the embedding model that the index was built with.
        generator: Returns the served model.
        connect: Returns the connection to the base URL of a server.
    """

    embeddings: Callable[[], Embeddings]
    generator: Callable[[], Generator]
    connect: Callable[[str], JsonServer] = no_connection


def build_reranker(spec: MethodSpec, models: RerankerModels) -> BaseDocumentCompressor:
    """Return the reranker that ``spec`` asks for.

    A field called ``embeddings``, ``generator`` or ``connect`` is set from ``models``; the others are parameters.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    reranker: BaseDocumentCompressor = RERANKERS.create(
        spec, {"embeddings": models.embeddings, "generator": models.generator, "connect": lambda: models.connect}
    )
    return reranker


def parse_reranker(text: str) -> MethodSpec:
    """Read ``name`` or ``name:parameter=value`` and check it: errors are reported before a model is loaded.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, a value out of range, or text that cannot be read.
    """
    spec = read_reranker(text)
    RERANKERS.check(spec)
    return spec
