"""Scores passages by several rerankers at once and adds their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import Annotated, Any, ClassVar, Literal, Self

from langchain_core.embeddings import Embeddings
from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.documents import CheckedDocument
from rag_posfix.contracts.generator import Generator, GeneratorCapability
from rag_posfix.contracts.method_spec import parse_method
from rag_posfix.errors import RagPosfixError
from rag_posfix.parameters import NumberList
from rag_posfix.reranking.base import RERANKERS, DocumentScore, ScoringReranker, sigmoid, z_scores
from rag_posfix.reranking.build import RerankerModels, build_reranker, no_loader
from rag_posfix.reranking.deadline import check_deadline
from rag_posfix.reranking.endpoint import JsonServer, no_connection

SCORE_FLOOR = 1e-3
"""Lower scores are raised to this before their logarithm is taken."""


def _check_scorers(scorers: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names and parameters of the scorers before a model is loaded."""
    for text in scorers:
        try:
            spec = parse_method(text, "reranker", "top_n=5")
            name = RERANKERS.resolve(spec.name)
            RERANKERS.check(spec)
        except RagPosfixError as error:
            raise PydanticCustomError("scorers", "{message}", {"message": str(error)}) from error
        if name == "fused":
            raise PydanticCustomError("scorers", "{text} nests fused; list its scorers", {"text": text})
    return scorers


@RERANKERS.register("fused")
class FusedReranker(ScoringReranker):
    """Add the scores of several rerankers.

    Source: the sum of z-scores is Lee (1997), Analyses of Multiple Evidence Combination (CombSUM),
        https://doi.org/10.1145/258525.258587
    Formula: with s_jk the score of scorer j for passage k: normalization="z" adds w_j (s_jk - mean_k) / std_k of the
        raw scores; normalization="log" adds w_j log max(s_jk, 0.001) of the scores in [0, 1]. raw_score is the sum;
        relevance_score = sigmoid of the sum divided by sum_j w_j for "z", exp of that for "log".
    Differs from the paper: scores are standardised, not mapped to [0, 1] by their extremes.
    Cost: that of all scorers, one after the other.
    Limits: those of its scorers. It depends on the given order where one of them does. A passage that a scorer did not
        read has the lowest z-score of those that it read.

    Attributes:
        embeddings: For scorers that need an embedding model.
        generator: For scorers that need the served model.
        connect: For scorers that are on a server.
        load_model: For scorers with a language model of their own.
        top_n: Number of passages to return, all if None.
        scorers: Two or more rerankers by name, with parameters as ``name:parameter=value``. In text,
            ``likelihood+embedding`` is short for ``fused:scorers=["likelihood","embedding"]``.
        weights: Weight of each scorer, all 1 if None.
        normalization: ``z`` or ``log``.
    """

    name: ClassVar[str] = "fused"
    reads: ClassVar[Set[GeneratorCapability]] = frozenset({"likelihood"})  # with the scorers of its default

    embeddings: Embeddings
    generator: Generator
    connect: Callable[[str], JsonServer] = Field(default=no_connection, exclude=True, repr=False)
    load_model: Callable[[str], Generator] = Field(default=no_loader, exclude=True, repr=False)
    scorers: Annotated[tuple[str, ...], AfterValidator(_check_scorers), Field(min_length=2, max_length=8)] = (
        "likelihood",
        "embedding",
    )
    weights: Annotated[
        tuple[float, ...] | None, NumberList(0, 100, exclusive_min=True, min_length=2, max_length=8)
    ] = None
    normalization: Literal["z", "log"] = "z"
    _members: tuple[ScoringReranker, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _make_members(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.scorers):
            raise PydanticCustomError(
                "weights",
                "weights has {given} numbers for {expected} scorers; give one for each",
                {"given": len(self.weights), "expected": len(self.scorers)},
            )
        self._members = tuple(self._member(text) for text in self.scorers)
        return self

    def _member(self, text: str) -> ScoringReranker:
        models = RerankerModels(lambda: self.embeddings, lambda: self.generator, self.connect, self.load_model)
        try:
            reranker = build_reranker(parse_method(text, "reranker", "top_n=5"), models)
        except RagPosfixError as error:
            raise PydanticCustomError("scorers", "{message}", {"message": str(error)}) from error
        if not isinstance(reranker, ScoringReranker):
            raise PydanticCustomError("scorers", "{text} gives no scores that can be added", {"text": text})
        return reranker

    def _score(self, question: str, documents: Sequence[CheckedDocument]) -> Sequence[DocumentScore]:
        total = [0.0] * len(documents)
        details: list[dict[str, Any]] = [{} for _ in documents]
        weights = self.weights or (1.0,) * len(self._members)
        for member, weight in zip(self._members, weights, strict=True):
            check_deadline()
            scores = member.score(question, documents)
            for index, value in enumerate(self._normalized(scores)):
                total[index] += weight * value
                details[index][member.name] = scores[index].raw
        mean = [value / math.fsum(weights) for value in total]
        squashed = [sigmoid(value) if self.normalization == "z" else math.exp(min(value, 0.0)) for value in mean]
        return [
            DocumentScore(score, raw, {"scores": detail})
            for score, raw, detail in zip(squashed, total, details, strict=True)
        ]

    def _normalized(self, scores: Sequence[DocumentScore]) -> list[float]:
        if self.normalization == "log":
            return [math.log(max(score.score, SCORE_FLOOR)) for score in scores]
        standardized = z_scores([score.raw for score in scores if score.raw is not None])
        lowest, values = min(standardized, default=0.0), iter(standardized)
        return [lowest if score.raw is None else next(values) for score in scores]
