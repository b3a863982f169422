"""Creates rerankers by name. Knows the models that they may need, but no reranker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec, parse_method, read_reranker
from rag_posfix.errors import ConfigError
from rag_posfix.reranking.base import RERANKERS
from rag_posfix.reranking.deadline import GuardedReranker
from rag_posfix.reranking.endpoint import JsonServer, no_connection

MOST_CHOSEN = 64
"""How many rerankers are kept of those that questions name."""


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


def check_loads_no_model(spec: MethodSpec) -> None:
    """Raise for rerankers that load a model: clients of a service choose rerankers, and must not make it load one."""
    scorers = [text for text in spec.parameters.get("scorers", ()) if isinstance(text, str)]
    for member in (spec, *(parse_method(text, "reranker", "top_n=5") for text in scorers)):
        loads = member.name in RERANKERS and getattr(RERANKERS.get(member.name), "loads_own_model", False)
        if loads or "model" in member.parameters:
            raise ConfigError(
                f"a question cannot choose {member.name} where it loads a model of its own; set RAG_POSFIX_RERANKER"
            )


def chooser(
    configured: MethodSpec, guarded: GuardedReranker, models: RerankerModels
) -> Callable[[MethodSpec], GuardedReranker]:
    """Return what gives questions the reranker that they name, with the deadline, threads and health of ``guarded``.

    Questions with the same reranker share it, and so its lock of the model.
    """
    others: dict[str, GuardedReranker] = {}

    def choose(spec: MethodSpec) -> GuardedReranker:
        if spec == configured:
            return guarded
        check_loads_no_model(spec)
        if len(others) >= MOST_CHOSEN:
            others.clear()
        return others.setdefault(spec.label, guarded.model_copy(update={"reranker": build_reranker(spec, models)}))

    return choose
