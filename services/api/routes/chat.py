"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_posfix.answer import Question
from services.api.completions import Completion
from services.api.facts import Facts, RequestFacts
from services.api.questions import to_question
from services.api.responses import SafeJSONResponse
from services.api.routes.body import CleanRoute
from services.api.routes.responses import errors
from services.api.schemas.chat import ChatCompletion, ChatRequest
from services.api.service import ReadyService, Service
from services.api.streaming import AnswerStream

__all__ = ["router"]

router = APIRouter(tags=["chat"], route_class=CleanRoute)


@router.post(
    "/v1/chat/completions",
    operation_id="create_chat_completion",
    response_model=ChatCompletion,
    responses=errors(400, 401, 404, 413, 422, 429, 500, 503, 504)
    | {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def create_chat_completion(
    body: ChatRequest, request: Request, service: ReadyService, facts: RequestFacts
) -> Response:
    """Answer the last message from documents: those of the request, or retrieved ones.

    With ``stream`` the answer comes as server-sent events; the last chunk before the usage says where it comes from.
    """
    service.check_model(body.model or "")
    facts.documents = None if body.documents is None else len(body.documents)
    question = to_question(body, service.pipeline.defaults.sampling, service.limits.max_documents)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    completion = Completion(service.model_id, service.pipeline.generator.fingerprint, include_usage=usage)
    if body.stream:
        return await _stream(service, request, question, completion, facts)
    with service.chat.open() as job:
        ask = partial(service.pipeline.ask, question)
        answer = await job.until_gone(request.receive, lambda: job.call(ask))
    service.record(answer, facts)
    return SafeJSONResponse(completion.whole(answer))


async def _stream(
    service: Service, request: Request, question: Question, completion: Completion, facts: Facts
) -> Response:
    on_close = ExitStack()
    job = on_close.enter_context(service.chat.open())
    stream = AnswerStream(job, completion, facts, lambda answer: service.record(answer, facts), on_close)
    await stream.open(partial(service.pipeline.stream, question), request.receive)
    return stream
