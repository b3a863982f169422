"""OpenAI embeddings, of the embedding model of the index."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field, Tag
from starlette.responses import Response

from rag_posfix.contracts.generator import TokenEncoder
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.retrieval.embeddings import MAX_TEXT_TOKENS, SentenceEmbeddings
from rag_posfix_api.dialects.requests import VISIBLE, Count, Forms, RequestModel, check_count
from rag_posfix_api.http.errors import OPENAI, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse, encode_json
from rag_posfix_api.runtime.service import Call, ReadyCall

_COUNTED_CHARACTERS = 65_536
_MAX_REQUEST_TOKENS = 300_000
"""Most tokens of the texts of a request, as in OpenAI's API."""


TextInput = Annotated[
    Annotated[str, Tag("string"), Field(json_schema_extra=VISIBLE)]
    | Annotated[
        list[Annotated[str, Field(json_schema_extra=VISIBLE)]],
        Field(min_length=1, fail_fast=True),
        Tag("array"),
    ],
    Forms("string", "array"),
    Field(
        description="A text, or several; not empty. A text longer than the model reads at a time is embedded as the "
        "mean of its parts. A text has up to 8,192 tokens, a request up to 300,000. Lists of token ids are refused."
    ),
]
"""The texts to embed."""


class EmbeddingRequest(RequestModel):
    """The texts to embed. Other fields of OpenAI's API have no effect here."""

    input: TextInput
    model: str | None = Field(default=None, description="The embedding model, or 'default'.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="'base64' gives the bytes of little-endian 32-bit floats."
    )
    dimensions: Count | None = Field(default=None, description="The length of the model's vectors; no other one.")


class EmbeddingObject(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class TokenUsage(BaseModel):
    """Tokens by the embedding model's tokenizer, else by the served model's, of 65,536 characters of each text."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: TokenUsage


router = APIRouter(tags=["embeddings"], route_class=CleanRoute)


@router.post(
    "/v1/embeddings",
    response_model=EmbeddingList,
    responses=OPENAI.responses(400, 401, 403, 404, 413, 422, 429, 500, 503),
)
async def create_embeddings(body: EmbeddingRequest, call: ReadyCall) -> Response:
    """Embed texts with the embedding model of the index. Runs beside answers; rerankings wait for it."""

    def render(vectors: Sequence[Sequence[float]], tokens: int, seconds: float) -> dict[str, Any]:
        # Plain data, not ``EmbeddingList``: it would check every number once more.
        data = [
            {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": call.service.embedding_model_id, "usage": usage}

    return await respond_with_vectors(call, body.model or "", body.input, body.dimensions, render)


async def respond_with_vectors(
    call: Call,
    model: str,
    inputs: str | Sequence[str],
    dimensions: int | None,
    render: Callable[[Sequence[Sequence[float]], int, float], dict[str, Any]],
    *,
    truncate: bool = False,
) -> Response:
    """Return the response with the vectors of texts; ``render`` makes its body of vectors, tokens and seconds.

    With ``truncate`` the first tokens of a text that is too long are embedded; without it, it is an error.
    """
    service = call.service
    service.check_embedding_model(model)
    texts = [inputs] if isinstance(inputs, str) else inputs
    check_count(len(texts), service.limits.max_documents, "input")
    if not all(text.strip() for text in texts):
        raise RequestError("input has an empty text; give each at least one visible character", param="input")
    call.fields.documents = len(texts)
    embed = partial(_embed, service.pipeline, texts, dimensions, render, truncate=truncate)
    content = await call.score(embed)
    return SafeJSONResponse(content)


def _embed(
    pipeline: Pipeline,
    texts: Sequence[str],
    dimensions: int | None,
    render: Callable[[Sequence[Sequence[float]], int, float], dict[str, Any]],
    *,
    truncate: bool,
) -> bytes:
    """Return the response, encoded here and not on the event loop: a thousand vectors take a while."""
    started = time.perf_counter()
    if pipeline.embeddings is None:
        raise RequestError(
            "this server has no embedding model; serve a pipeline with one to embed texts", code="unsupported"
        )
    tokens = _embedded_tokens(pipeline, texts, truncate=truncate)
    vectors = pipeline.embeddings.embed_documents(list(texts))
    if dimensions not in (None, len(vectors[0])):
        raise RequestError(
            f"dimensions={dimensions} is not supported; the model's vectors have {len(vectors[0])}",
            param="dimensions",
            code="unsupported",
        )
    return encode_json(render(vectors, tokens, time.perf_counter() - started))


def _embedded_tokens(pipeline: Pipeline, texts: Sequence[str], *, truncate: bool) -> int:
    """Return how many tokens of texts are embedded; raise ``RequestError`` for more than are read."""
    if not isinstance(pipeline.embeddings, SentenceEmbeddings):  # its server has its own limits
        return count_tokens(pipeline.generator.encoder, texts)
    total = 0
    for index, text in enumerate(texts):
        n_tokens = pipeline.embeddings.embedded_tokens(text)
        if n_tokens > MAX_TEXT_TOKENS and not truncate:
            raise RequestError(
                f"text {index} of input has more than {MAX_TEXT_TOKENS} tokens, the most that are embedded of a text; "
                "split it into passages",
                param="input",
            )
        total += min(n_tokens, MAX_TEXT_TOKENS)
        if total > _MAX_REQUEST_TOKENS:
            raise RequestError(
                f"input has more than {_MAX_REQUEST_TOKENS} tokens, the most of a request; send fewer texts at a time",
                param="input",
            )
    return total


def count_tokens(encoder: TokenEncoder, texts: Sequence[str]) -> int:
    """Return the number of tokens of texts by the served model's tokenizer.

    Of each text the first 65,536 characters are counted: scorers read less, and the rest would take seconds.
    """
    return sum(len(encoder.encode_text(text[:_COUNTED_CHARACTERS])) for text in texts)


def _encode_vector(vector: Sequence[float], encoding_format: str | None) -> Sequence[float] | str:
    if encoding_format != "base64":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
