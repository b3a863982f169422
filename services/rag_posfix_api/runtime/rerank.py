"""Scores the documents of a rerank request of any dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import Document

from rag_posfix.caching.answers.keys import tenant_salt
from rag_posfix.contracts.cache_salt import salted
from rag_posfix.contracts.retrieval import rerank_indexed
from rag_posfix.errors import RerankingError
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.http.errors import UnsupportedFeatureError


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a request's documents.

    Attributes:
        ranked: (index in the request, relevance), best first; equal scores keep the order of the request.
        tokens: Tokens of the query and of all documents, counted with the served model's tokenizer.
    """

    ranked: tuple[tuple[int, float], ...]
    tokens: int

    @property
    def tied(self) -> bool:
        """Whether there are several documents, all with the same score."""
        return len(self.ranked) > 1 and self.ranked[0][1] == self.ranked[-1][1]


def score_texts(pipeline: Pipeline, query: str, texts: Sequence[str]) -> Scored:
    """Return the relevance of each text for ``query``.

    Raises:
        UnsupportedFeatureError: the pipeline has no reranker.
        RerankingError: the reranker scored nothing.
    """
    if pipeline.reranker is None:
        raise UnsupportedFeatureError("this server has no reranker; serve a pipeline with one to rerank")
    documents = [Document(page_content=text) for text in texts]
    with salted(tenant_salt(pipeline.defaults.tenant)), pipeline.tracer.stage("reranker", query, documents) as stage:
        scored = rerank_indexed(pipeline.reranker, query, documents)
        stage.done([one.document for one in scored])
    ranked = sorted(((one.index, _relevance(one.document)) for one in scored), key=lambda r: (-r[1], r[0]))
    encoder = pipeline.generator.encoder
    return Scored(tuple(ranked), sum(len(encoder.encode_text(text)) for text in (query, *texts)))


def _relevance(document: Document) -> float:
    score = document.metadata.get("relevance_score")
    if score is None:
        raise RerankingError("the reranker failed, or was late, and scored nothing; its log line says which")
    return float(score)
