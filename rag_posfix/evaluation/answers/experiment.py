"""Common parts of the answer experiments: checked methods, loaded models, and the head of the record."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.answers.arrangement import Arrangement, check_arrangements
from rag_posfix.evaluation.data.datasets import data_facts
from rag_posfix.evaluation.data.position_example import PositionExample
from rag_posfix.evaluation.progress import Progress
from rag_posfix.evaluation.record import environment, model_facts
from rag_posfix.evaluation.speed.runs import with_store
from rag_posfix.generation.engine import Engine
from rag_posfix.settings import Settings


def checked_arrangements(choices: Sequence[MethodSpec | Arrangement]) -> list[Arrangement]:
    """Return methods and arrangements as arrangements, checked before a model is loaded.

    Raises:
        ConfigError: an unknown name or parameter, a value outside of what is allowed, or one is named twice.
    """
    arrangements = [one if isinstance(one, Arrangement) else Arrangement(one) for one in choices]
    check_arrangements(arrangements)
    return arrangements


def arrangement_rerankers(
    arrangements: Sequence[Arrangement], engine: Generator, settings: Settings | None
) -> dict[str, Reranker]:
    """Return the rerankers that ``arrangements`` name, by label.

    Args:
        engine: The model, for rerankers that read passages with it.
        settings: Names the embeddings; read from the environment if None and needed.
    """
    from rag_posfix.pipeline.build import build_embeddings
    from rag_posfix.reranking.build import RerankerModels, build_reranker

    specs = {one.reranker.label: one.reranker for one in arrangements if one.reranker is not None}
    embeddings = functools.cache(lambda: build_embeddings(settings or Settings()))
    models = RerankerModels(embeddings=embeddings, generator=lambda: engine)
    return {label: build_reranker(spec, models) for label, spec in specs.items()}


def load_models(
    choices: Sequence[Arrangement],
    engine: Generator | None,
    reranker: Reranker | None,
    settings: Settings | None,
    progress: Progress,
) -> tuple[Generator, Reranker, str]:
    """Return the model, the reranker that scores the passages, and the name of the reranker in the record.

    Args:
        choices: The arrangements, all run on the model.
        engine: The model; loaded by ``settings`` if None.
        reranker: Scores the passages; if None, the embeddings of ``settings``.
        settings: Read from the environment if None and needed.
        progress: Progress callback (``evaluation.progress``).

    Raises:
        ConfigError: the model or a setting is wrong.
        UnsupportedModelError: a method does not support the model.
    """
    relevance = type(reranker).__name__
    if engine is None or reranker is None:
        chosen = settings or Settings()
        with progress("loading the model and the embeddings"):
            from rag_posfix.pipeline.build import build_embeddings, build_generator
            from rag_posfix.reranking.embedding import EmbeddingReranker

            engine = engine or build_generator(chosen)
            if reranker is None:
                reranker, relevance = EmbeddingReranker(embeddings=build_embeddings(chosen)), chosen.embedding_model
    for choice in choices:
        engine.describe(choice.mitigation)
    return engine, reranker, relevance


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the head of a record says of a model and of what was run on it.

    Attributes:
        model: Versions, machine and model.
        mitigations: The arrangements by label.
    """

    model: Mapping[str, Any]
    mitigations: Mapping[str, Any]


def engine_facts(engine: Generator, choices: Sequence[Arrangement]) -> EngineFacts:
    """Return what the head of a record says of ``engine``, and of ``choices`` on it."""
    mitigations = {choice.label: _arrangement_facts(engine, choice) for choice in choices}
    return EngineFacts({**environment(), **model_facts(engine)}, mitigations)


def with_passages_kept(engine: Generator, max_bytes: int) -> Engine:
    """Return the engine with a passage KV store in memory, so that the next condition finds what this one read.

    Raises:
        ConfigError: the model is on a server.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"reuse keeps keys and values in this process, and {engine.model_id} is on a server")
    from rag_posfix.caching.kv.memory import MemoryPassages
    from rag_posfix.caching.kv.store import PassageStore

    return with_store(engine, PassageStore([MemoryPassages(max_bytes)]))


def answers_head(
    kind: str,
    facts: EngineFacts,
    data: Path | Sequence[PositionExample],
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the head of the record: versions, model, data, settings and summary."""
    return {
        "kind": kind,
        **facts.model,
        "data": data_facts(data),
        "template": PromptTemplate().fingerprint(),
        "mitigations": dict(facts.mitigations),
        "settings": settings,
        "summary": summary,
    }


def _arrangement_facts(engine: Generator, arrangement: Arrangement) -> dict[str, Any]:
    spec = arrangement.mitigation
    return {
        "parameters": spec.parameters,
        "fingerprint": engine.describe(spec).fingerprint,
        "order": arrangement.order,
        "reranker": None if arrangement.reranker is None else arrangement.reranker.label,
        "order_free": arrangement.order_free,
    }
