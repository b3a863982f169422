"""Creates rerankers by name. Knows the models that they may need, but no reranker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec, read_reranker
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.endpoint import JsonServer, no_connection


def no_loader(model: str) -> Generator:
    """Raise: nobody supplied a function that loads models."""
    raise ConfigError(f"nothing loads model={model!r} here; make the reranker with build_pipeline, or give load_model")


@dataclass(frozen=True, slots=True)
class RerankerModels:
    """The models that a reranker may use. Each is a function that is called only for rerankers that need the model.

    Attributes:
        embeddings: Returns the embedding model that the index was built with.
        generator: Returns the served model.
        connect: Returns the connection to the base URL of a server.
        load_model: Returns the generator of another model than the served one, by name.
    """

    embeddings: Callable[[], Embeddings]
    generator: Callable[[], Generator]
    connect: Callable[[str], JsonServer] = no_connection
    load_model: Callable[[str], Generator] = no_loader


def build_reranker(spec: MethodSpec, models: RerankerModels) -> BaseDocumentCompressor:
    """Return the reranker that ``spec`` asks for.

    A field that is called as one of ``models`` is set from it; the others are parameters. With the parameter ``model``
    a reranker that takes a ``generator`` gets that model in place of the served one.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of its range.
    """
    model = spec.parameters.get("model")
    parts = {
        "embeddings": models.embeddings,
        "generator": partial(models.load_model, model) if isinstance(model, str) else models.generator,
        "connect": lambda: models.connect,
        "load_model": lambda: models.load_model,
    }
    reranker: BaseDocumentCompressor = RERANKERS.create(spec, parts)
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
