"""What the answer experiments share: checked methods, loaded models, and the head of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.contracts.retrieval import Reranker
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.datasets import PositionExample, data_facts
from rag_posfix.evaluation.progress import Progress
from rag_posfix.evaluation.record import environment, model_facts
from rag_posfix.generation.engine import Engine
from rag_posfix.mitigations import create
from rag_posfix.settings import Settings

__all__ = ["answers_head", "check_choices", "load_models"]


def check_choices(choices: Sequence[MitigationChoice]) -> None:
    """Check methods against the registry: a typing error is told before a model is loaded.

    Raises:
        ConfigError: an unknown method or parameter, a value outside of what is allowed, or a method twice.
    """
    for index, choice in enumerate(choices):
        create(choice.name, choice.parameters)
        if choice in choices[:index]:
            raise ConfigError(f"{choice.label!r} is named twice with the same parameters; once is all")


def load_models(
    choices: Sequence[MitigationChoice],
    engine: Engine | None,
    reranker: Reranker | None,
    settings: Settings | None,
    progress: Progress,
) -> tuple[Engine, Reranker, str]:
    """Return the model, which runs every method, what scores the passages, and the name of the latter in the record.

    Args:
        choices: The methods.
        engine: The model; loaded as ``settings`` say if None.
        reranker: Scores the passages; if None, the embeddings that ``settings`` name.
        settings: Read from the environment if None and needed.
        progress: Shows that something is loaded.

    Raises:
        ConfigError: the model or a setting is at fault.
        UnsupportedModelError: the model cannot run a method.
    """
    relevance = type(reranker).__name__
    if engine is None or reranker is None:
        chosen = settings or Settings()
        with progress("loading the model and the embeddings"):
            from rag_posfix.pipeline.build import build_embeddings, build_engine
            from rag_posfix.reranking.embedding import EmbeddingReranker

            engine = engine or build_engine(chosen)
            if reranker is None:
                reranker, relevance = EmbeddingReranker(embeddings=build_embeddings(chosen)), chosen.embedding_model
    for choice in choices:
        engine.describe(choice)
    return engine, reranker, relevance


def answers_head(
    kind: str,
    engine: Engine,
    choices: Sequence[MitigationChoice],
    data: Path | Sequence[PositionExample],
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the head of the record: what ran, on what, with what, and what was found."""
    return {
        "kind": kind,
        **environment(),
        **model_facts(engine),
        "data": data_facts(data),
        "template": PromptTemplate().fingerprint(),
        "mitigations": {
            choice.label: {"parameters": choice.parameters, "fingerprint": engine.describe(choice).fingerprint}
            for choice in choices
        },
        "settings": settings,
        "summary": summary,
    }
