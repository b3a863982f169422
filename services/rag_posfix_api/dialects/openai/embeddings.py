"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.documents import check_count
from rag_posfix_api.dialects.openai.embedding_schemas import EmbeddingList, EmbeddingRequest
from rag_posfix_api.dialects.openai.errors import errors
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.encoding import encode_json
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.embed import embed_texts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["router"]

router = APIRouter(tags=["embeddings"], route_class=CleanRoute)


@router.post(
    "/v1/embeddings",
    operation_id="create_embeddings",
    response_model=EmbeddingList,
    responses=errors(400, 401, 403, 404, 413, 422, 429, 500, 503),
)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Embed texts with the embedding model of the index. Runs beside answers; rerankings wait for it."""
    service.check_embedding_model(body.model or "")
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_count(len(texts), service.limits.max_documents, "input")
    if not all(text.strip() for text in texts):
        raise InvalidRequestError("input has an empty text; give each at least one visible character", param="input")
    facts.documents = len(texts)
    answer = partial(_embedded, service.pipeline, texts, body, service.embedding_model_id)
    with service.rerank.open() as job:
        content = await job.until_gone(request.receive, lambda: job.permitted(answer))
    return Response(content, media_type="application/json")


def _embedded(pipeline: Pipeline, texts: Sequence[str], body: EmbeddingRequest, model: str) -> bytes:
    """Return the response, encoded here and not on the event loop: a thousand vectors take a while."""
    embedded = embed_texts(pipeline, texts)
    length = len(embedded.vectors[0])
    if body.dimensions not in (None, length):
        raise UnsupportedFeatureError(
            f"dimensions={body.dimensions} is not supported; the model's vectors have {length}", param="dimensions"
        )
    # Plain data, not ``EmbeddingList``: it would check every number once more.
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens}
    return encode_json({"object": "list", "data": data, "model": model, "usage": usage})


def _encoded(vector: Sequence[float], encoding_format: str | None) -> Sequence[float] | str:
    if encoding_format != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
