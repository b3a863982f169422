"""Renders scores in Jina's wire format."""

from __future__ import annotations

from rag_posfix_api.dialects.documents import DocumentObject, document_text
from rag_posfix_api.dialects.jina.schemas import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
)
from rag_posfix_api.dialects.reranking import document_id
from rag_posfix_api.runtime.rerank import Scored

__all__ = ["to_response"]


def to_response(scored: Scored, body: RerankRequest, identity: str, model: str) -> RerankResponse:
    """Return the response to ``body``: the best ``top_n`` documents, with their texts if the request wants them."""
    shown = body.return_documents is not False
    results = [
        RerankResult(
            index=index,
            relevance_score=relevance,
            document=_document(body.documents[index]) if shown else None,
        )
        for index, relevance in scored.ranked[: body.top_n]
    ]
    usage = RerankUsage(total_tokens=scored.tokens, prompt_tokens=scored.tokens)
    return RerankResponse(id=identity, model=model, results=results, usage=usage)


def _document(given: str | DocumentObject) -> RerankDocument:
    return RerankDocument(text=document_text(given), id=document_id(given))
