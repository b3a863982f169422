"""POST /api/chat and GET /api/tags."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix_api.dialects.answering import respond
from rag_posfix_api.dialects.conversation import refuse_fields
from rag_posfix_api.dialects.documents import to_documents
from rag_posfix_api.dialects.messages import chat_message
from rag_posfix_api.dialects.ollama.errors import errors
from rag_posfix_api.dialects.ollama.render import OllamaRenderer
from rag_posfix_api.dialects.ollama.schemas import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaModel,
    OllamaModels,
    OllamaOptions,
)
from rag_posfix_api.dialects.questions import build_question, sampling_with, stop_strings
from rag_posfix_api.dialects.statuses import ANSWERING
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.facts import RequestFacts
from rag_posfix_api.runtime.service import ReadyService

__all__ = ["CHAT_PATH", "TAGS_PATH", "router"]

CHAT_PATH = "/api/chat"
TAGS_PATH = "/api/tags"
LINES = "application/x-ndjson"

router = APIRouter()
chats = APIRouter(tags=["chat"], route_class=CleanRoute)
models = APIRouter(tags=["models"])

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "format": (None, ""),
    "think": (None, False),
    "logprobs": (None, False),
}


@chats.post(
    CHAT_PATH,
    operation_id="ollama_chat",
    response_model=OllamaChatResponse,
    responses=errors(*ANSWERING) | {200: {"content": {LINES: {"schema": {"type": "string"}}}}},
)
async def chat(body: OllamaChatRequest, request: Request, service: ReadyService, facts: RequestFacts) -> Response:
    """Answer the last message from documents: those of the request, or retrieved ones; in lines of JSON by default."""
    service.check_model(body.model.removesuffix(":latest"))
    question = to_question(body, service.pipeline.defaults.sampling, service.limits.max_documents)
    renderer, stream = OllamaRenderer(body.model), body.stream is not False
    return await respond(
        service, request, facts, question, renderer, stream=stream, media_type=LINES, added=body.posfix
    )


def to_question(body: OllamaChatRequest, defaults: Sampling, max_documents: int) -> Question:
    """Return the question of a chat request. Errors as those of OpenAI's chat.

    Args:
        body: The request.
        defaults: Default sampling parameters.
        max_documents: Maximum number of documents.
    """
    refuse_fields(body.model_extra, _REFUSED)
    for message in body.messages:
        refuse_fields(message.model_extra, {"images": (None, []), "tool_calls": (None, [])})
    options = body.options or OllamaOptions()
    sampling = sampling_with(
        defaults,
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=stop_strings(options.stop, "options.stop"),
    )
    return build_question(
        [chat_message(message, index) for index, message in enumerate(body.messages)],
        sampling,
        None if body.documents is None else to_documents(body.documents, max_documents),
        body.posfix,
        role=body.messages[-1].role,
        seed=options.seed,
    )


@models.get(TAGS_PATH, operation_id="ollama_tags", response_model=OllamaModels, responses=errors(401, 403, 500, 503))
async def tags(service: ReadyService) -> OllamaModels:
    """List the served model."""
    started = datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
    name, digest = service.model_id, service.pipeline.generator.fingerprint
    details = {"parent_model": "", "format": "", "family": "", "parameter_size": "", "quantization_level": ""}
    return OllamaModels(
        models=[OllamaModel(name=name, model=name, modified_at=started, digest=digest, details=details)]
    )


router.include_router(chats)
router.include_router(models)
