"""What the chat routes of all dialects do with a question: run it, and render the answer whole or as a stream."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, Question
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.facts import Facts
from rag_posfix_api.http.streaming import AnswerStream, EventRenderer
from rag_posfix_api.runtime.service import Service

__all__ = ["AnswerRenderer", "respond"]


class AnswerRenderer(EventRenderer, Protocol):
    """Renders one answer in one dialect, as events or as one object."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...


async def respond(
    service: Service, request: Request, facts: Facts, question: Question, renderer: AnswerRenderer, *, stream: bool
) -> Response:
    """Return the response to a question. The work stops when the client leaves.

    Args:
        service: The service.
        request: The request.
        facts: Log fields.
        question: The question.
        renderer: Renders the answer in the dialect of the request.
        stream: Whether the answer is sent as server-sent events.

    Raises:
        RagPosfixError: the question cannot be answered, or there is no capacity now.
    """
    facts.documents = None if question.documents is None else len(question.documents)
    if stream:
        return await _stream(service, request, facts, question, renderer)
    with service.chat.open() as job:
        ask = partial(service.pipeline.ask, question)
        answer = await job.until_gone(request.receive, lambda: job.call(ask))
    service.record(answer, facts)
    return SafeJSONResponse(renderer.whole(answer))


async def _stream(
    service: Service, request: Request, facts: Facts, question: Question, renderer: EventRenderer
) -> Response:
    on_close = ExitStack()
    job = on_close.enter_context(service.chat.open())
    stream = AnswerStream(job, renderer, facts, lambda answer: service.record(answer, facts), on_close)
    await stream.open(partial(service.pipeline.stream, question), request.receive)
    return stream
