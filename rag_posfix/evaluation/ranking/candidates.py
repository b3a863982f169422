"""Rerankers as they are named on the command line: checked, made, identified, and asked about one query."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from pydantic import ValidationError, create_model

from rag_posfix.contracts.generator import Generator, Reranker
from rag_posfix.contracts.request import MitigationChoice
from rag_posfix.errors import ConfigError, EvaluationError, RagPosfixError
from rag_posfix.evaluation.labels import label
from rag_posfix.evaluation.ranking.rankings import Candidates, Ranking, checked_ranking
from rag_posfix.evaluation.speed.model_work import counted
from rag_posfix.reranking import RERANKERS
from rag_posfix.reranking.build import RerankerModels, build_reranker, parameters_of
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.settings import Settings
from rag_posfix.text import content_hash

if TYPE_CHECKING:
    from langchain_core.documents import BaseDocumentCompressor

__all__ = [
    "OpenedReranker",
    "RerankerChoice",
    "check_distinct",
    "check_reranker",
    "open_reranker",
    "parts_of",
    "rerank_one",
]


@dataclass(frozen=True, slots=True)
class RerankerChoice:
    """A reranker by name, with its parameters."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and parameters, in the form that the command line reads."""
        return label(MitigationChoice(self.name, self.parameters))


@dataclass(frozen=True, slots=True, eq=False)
class OpenedReranker:
    """A reranker that can be asked.

    Attributes:
        label: Name and parameters.
        identity: Changes with the reranker, its parameters and the weights that it reads with.
        reranker: The reranker.
    """

    label: str
    identity: str
    reranker: Reranker


def check_distinct(choices: Sequence[RerankerChoice]) -> None:
    """Check that no reranker is named twice with the same parameters.

    Args:
        choices: The rerankers.

    Raises:
        ConfigError: one is.
    """
    labels = [choice.label for choice in choices]
    for label_ in labels:
        if labels.count(label_) > 1:
            raise ConfigError(f"reranker {label_!r} is named twice with the same parameters; once is all")


def check_reranker(choice: RerankerChoice) -> None:
    """Check name and parameters without making the reranker: a typing error is told before a model is loaded.

    Args:
        choice: The reranker.

    Raises:
        UnknownNameError: no reranker has this name.
        ConfigError: an unknown parameter, or a value outside of what is allowed.
    """
    kind = RERANKERS.get(choice.name)
    own = {name: kind.model_fields[name] for name in parameters_of(kind)}
    unknown = [name for name in choice.parameters if name not in own]
    if unknown:  # which build_reranker refuses before it makes anything
        build_reranker(choice.name, choice.parameters, RerankerModels(embeddings=_never, generator=_never))
    fields: dict[str, Any] = {name: (info.annotation, info) for name, info in own.items()}
    try:
        create_model("Parameters", __config__=kind.model_config, **fields)(**choice.parameters)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{choice.name}: {where}={first.get('input')!r}: {first['msg']}") from error


def parts_of(settings: Settings) -> RerankerModels:
    """Return what rerankers are made from; each part is loaded when it is first needed, once.

    Args:
        settings: Model, embedding model, dtype and device.
    """

    @functools.cache
    def embeddings() -> Embeddings:
        from rag_posfix.generation.load import quiet_loading
        from rag_posfix.retrieval.embeddings import SentenceEmbeddings

        made = SentenceEmbeddings(settings.embedding_model)
        with quiet_loading():
            embedding_identity(made)  # which loads the model
        return made

    @functools.cache
    def generator() -> Generator:
        from rag_posfix.generation.load import load_engine

        return load_engine(settings.model, dtype=settings.dtype, device=settings.device, cache_dir=settings.cache_dir)

    return RerankerModels(embeddings=embeddings, generator=generator)


def open_reranker(choice: RerankerChoice, parts: RerankerModels) -> OpenedReranker:
    """Return a reranker that can be asked, its model loaded.

    Args:
        choice: The reranker.
        parts: What it is made from.

    Raises:
        ConfigError: the name, a parameter or the model is at fault.
    """
    reranker = build_reranker(choice.name, choice.parameters, parts)
    return OpenedReranker(choice.label, _identity(choice.name, reranker), reranker)


def rerank_one(opened: OpenedReranker, candidates: Candidates) -> Ranking:
    """Rank the candidates of one query; without candidates the reranker is not asked.

    Args:
        opened: The reranker.
        candidates: The query and its documents; left untouched whatever the reranker does.

    Raises:
        EvaluationError: the reranker failed, or returned something else than scored candidates.
    """
    if not candidates.documents:
        return Ranking((), (), 0.0)
    reranker = opened.reranker
    given = [Document(id=d.id, page_content=d.page_content, metadata=dict(d.metadata)) for d in candidates.documents]
    before = _generations(reranker)
    with counted(getattr(reranker, "generator", None)) as work:
        started = time.perf_counter()
        try:
            returned = reranker.compress_documents(given, candidates.question)
        except RagPosfixError as error:
            raise EvaluationError(
                f"{opened.label} failed on query {candidates.query!r} ({type(error).__name__}: {error}); what "
                "was ranked before is kept"
            ) from error
        seconds = time.perf_counter() - started
    ids, scores = checked_ranking(opened.label, candidates.query, candidates.documents, returned)
    after = _generations(reranker)
    return Ranking(
        ids, scores, seconds, forward_passes=work.forward_passes, tokens_read=work.tokens,
        calls=None if before is None or after is None else after - before,
    )  # fmt: skip


def _generations(reranker: Reranker) -> int | None:
    """Return how many answers a reranker let the model write so far, None where it counts none."""
    counted_so_far = getattr(reranker, "generations", None)
    return counted_so_far if isinstance(counted_so_far, int) else None


def _identity(name: str, reranker: BaseDocumentCompressor) -> str:
    kind = type(reranker)
    values = reranker.model_dump(mode="json", include=set(parameters_of(kind)))
    made_from = {
        part: _identity_of(getattr(reranker, part)) for part in RerankerModels.__slots__ if part in kind.model_fields
    }
    return content_hash(json.dumps([name, values, made_from], sort_keys=True))


def _identity_of(part: Any) -> str:
    fingerprint = getattr(part, "fingerprint", None)
    device = getattr(getattr(part, "loaded", None), "device", "")
    return f"{fingerprint} {device}" if isinstance(fingerprint, str) else embedding_identity(part)


def _never() -> Any:
    raise ConfigError("this reranker's parameters were to be refused before its model is loaded")
