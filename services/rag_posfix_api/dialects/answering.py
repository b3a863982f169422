"""What the chat routes of all dialects do with a question: run it, and render the answer whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.posfix import PosfixInput
from rag_posfix_api.http.encoding import SafeJSONResponse
from rag_posfix_api.http.errors import InvalidRequestError
from rag_posfix_api.http.facts import Facts
from rag_posfix_api.http.streaming import SERVER_SENT_EVENTS, AnswerStream, EventRenderer
from rag_posfix_api.runtime.service import Service

__all__ = ["AnswerRenderer", "respond", "respond_with_stream"]


class AnswerRenderer(EventRenderer, Protocol):
    """Renders one answer in one dialect, as events or as one object."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...


async def respond(
    service: Service,
    request: Request,
    facts: Facts,
    question: Question,
    renderer: AnswerRenderer,
    *,
    stream: bool,
    added: PosfixInput | None,
    media_type: str = SERVER_SENT_EVENTS,
) -> Response:
    """Return the response to a question. The work stops when the client leaves.

    Args:
        service: The service.
        request: The request.
        facts: Log fields.
        question: The question.
        renderer: Renders the answer in the dialect of the request.
        stream: Whether the answer is sent in pieces.
        added: What the request has beyond the format: the collection to retrieve from.
        media_type: Media type of the pieces.

    Raises:
        RagPosfixError: the question cannot be answered, or there is no capacity now.
    """
    facts.documents = None if question.documents is None else len(question.documents)
    pipeline = _pipeline(service, question, None if added is None else added.collection)
    if stream:
        return await respond_with_stream(
            service, request, facts, lambda: pipeline().stream(question), renderer, media_type
        )
    with service.chat.open() as job:
        answer = await job.until_gone(request.receive, lambda: job.call(lambda: pipeline().ask(question)))
    service.record(answer, facts)
    return SafeJSONResponse(renderer.whole(answer))


def _pipeline(service: Service, question: Question, name: str | None) -> Callable[[], Pipeline]:
    """Return a function that returns the pipeline of the request; it may read a collection, so it is for a thread."""
    pipeline = service.pipeline
    if name is None:
        return lambda: pipeline
    if question.documents is not None:
        raise InvalidRequestError("documents and a collection are given; give one of them", param="posfix.collection")
    collection, k = service.collection(name), question.k or pipeline.defaults.k
    return lambda: pipeline.with_retriever(collection.retriever(k))


async def respond_with_stream(
    service: Service,
    request: Request,
    facts: Facts,
    start: Callable[[], Iterator[AnswerChunk]],
    renderer: EventRenderer,
    media_type: str = SERVER_SENT_EVENTS,
) -> Response:
    """Return the response that streams what ``start`` returns. Wrong input raises here, before the response begins.

    Args:
        service: The service.
        request: The request.
        facts: Log fields.
        start: Begins the work; called in a worker thread.
        renderer: Renders the pieces.
        media_type: Their media type.
    """
    on_close = ExitStack()
    job = on_close.enter_context(service.chat.open())
    stream = AnswerStream(job, renderer, facts, lambda answer: service.record(answer, facts), on_close, media_type)
    await stream.open(start, request.receive)
    return stream
