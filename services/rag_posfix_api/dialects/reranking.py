"""What the rerank routes of all dialects do with a query and documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from fastapi import Request

from rag_posfix_api.dialects.documents import DocumentObject, check_count, document_text
from rag_posfix_api.http.errors import InvalidRequestError
from rag_posfix_api.http.facts import Facts
from rag_posfix_api.runtime.rerank import Scored, score_texts
from rag_posfix_api.runtime.service import Service

__all__ = ["document_id", "rank"]

_log = logging.getLogger(__name__)


async def rank(
    service: Service,
    request: Request,
    facts: Facts,
    query: str,
    documents: Sequence[str | DocumentObject],
    param: str = "documents",
) -> Scored:
    """Return the scores of documents, best first; equal scores keep the order of the request.

    Scores that are all equal are logged and counted: a scorer that cannot tell documents apart is usually broken.

    Args:
        service: The service.
        request: The request; the work stops when its client leaves.
        facts: Log fields.
        query: The query.
        documents: The documents.
        param: The field of the documents in this dialect.

    Raises:
        InvalidRequestError: the query is blank, or there are too many documents.
    """
    check_count(len(documents), service.limits.max_documents, param)
    if not query.strip():
        raise InvalidRequestError("query is empty; give at least one visible character", param="query")
    facts.documents = len(documents)
    score = partial(score_texts, service.pipeline, query, [document_text(document) for document in documents])
    with service.rerank.open() as job:
        scored = await job.until_gone(request.receive, lambda: job.permitted(score))
    if scored.tied:
        service.metrics.tied_ranking()
        _log.warning("reranking: all %d documents have the same score; check the reranker", len(documents))
    return scored


def document_id(document: str | DocumentObject) -> str | None:
    """Return the id that the client gave a document, or None."""
    return None if isinstance(document, str) else document.id
