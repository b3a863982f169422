"""Chat routes of all dialects: the question of a conversation, its answer whole or as a stream, and its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar, get_type_hints

from fastapi import APIRouter, Request
from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import MOST_ALTERNATIVES
from rag_posfix.parameters import shown
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.dialects.errors import ANSWERING
from rag_posfix_api.dialects.requests import MAX_STOP_CHARACTERS, MAX_STOPS, PosfixInput, chosen_methods
from rag_posfix_api.http.errors import ErrorForm, InvalidRequestError, UnsupportedFeatureError
from rag_posfix_api.http.json_bodies import SafeJSONResponse
from rag_posfix_api.http.logs import LogFields, RequestLogFields
from rag_posfix_api.runtime.jobs import SERVER_SENT_EVENTS, AnswerStream, EventRenderer
from rag_posfix_api.runtime.service import ReadyService, Service

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "description": "A server-sent event."}}}}
}
"""The entry for ``responses=`` of a route that streams."""


class AnswerRenderer(EventRenderer, Protocol):
    """Renders one answer in one dialect, as events or as one object."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        ...


Prepare = TypeVar("Prepare", bound=Callable[..., tuple[Question, AnswerRenderer]])


def chat_route(
    router: APIRouter,
    path: str,
    form: ErrorForm,
    operation_id: str,
    response_model: type[BaseModel],
    *,
    lines: str | None = None,
) -> Callable[[Prepare], Prepare]:
    """Add a route that answers the question of a conversation.

    The decorated function takes the body and the service, and returns the question and its renderer. Its name and its
    docstring describe the route. The work stops when the client leaves. ``lines`` is the media type of a format that
    streams lines unless ``stream`` is false; other formats stream events if ``stream`` is true.
    """
    streamed = STREAMED if lines is None else {200: {"content": {lines: {"schema": {"type": "string"}}}}}

    def decorate(prepare: Prepare) -> Prepare:
        async def endpoint(body: Any, request: Request, service: ReadyService, fields: RequestLogFields) -> Response:
            question, renderer = prepare(body, service)
            fields.documents = None if question.documents is None else len(question.documents)
            pipeline = _pipeline(service, question, None if body.posfix is None else body.posfix.collection)
            if body.stream if lines is None else body.stream is not False:
                return await respond_with_stream(
                    service,
                    request,
                    fields,
                    lambda: pipeline().stream(question),
                    renderer,
                    lines or SERVER_SENT_EVENTS,
                )
            answer = await service.chat.run(request.receive, lambda: pipeline().ask(question))
            service.record(answer, fields)
            return SafeJSONResponse(renderer.whole(answer))

        endpoint.__name__, endpoint.__doc__ = prepare.__name__, prepare.__doc__
        endpoint.__annotations__["body"] = get_type_hints(prepare)["body"]
        responses = form.responses(*ANSWERING) | streamed
        router.post(
            path, tags=["chat"], operation_id=operation_id, response_model=response_model, responses=responses
        )(endpoint)
        return prepare

    return decorate


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
    fields: LogFields,
    start: Callable[[], Iterator[AnswerChunk]],
    renderer: EventRenderer,
    media_type: str = SERVER_SENT_EVENTS,
) -> Response:
    """Return the response that streams what ``start`` returns, which is called in a worker thread.

    Wrong input raises here, before the response begins.
    """
    on_close = ExitStack()
    job = on_close.enter_context(service.chat.open())
    stream = AnswerStream(job, on_close, renderer, fields, lambda answer: service.record(answer, fields), media_type)
    await stream.open(start, request.receive)
    return stream


def build_question(
    service: Service,
    messages: Sequence[ChatMessage],
    documents: Sequence[Document] | None,
    posfix: PosfixInput | None,
    *,
    role: str,
    system: str | None = None,
    use_cache: bool = True,
    param: str = "messages",
    **sampling: Any,
) -> Question:
    """Return the question that the last message asks.

    Args:
        documents: The passages; None retrieves them.
        posfix: What this service adds to the dialect.
        role: The role of the last message as the request has it, for the error.
        system: Instructions before the conversation.
        use_cache: Whether the answer cache may be used.
        param: The field of the messages in this dialect.
        sampling: Sampling parameters; None takes the default. ``seed`` also seeds the order ``random``.

    Raises:
        InvalidRequestError: the last message is not the user's or is empty, or fields of ``posfix`` contradict each
            other.
        ConfigError: a sampling parameter is out of range.
    """
    chosen = {name: value for name, value in sampling.items() if value is not None}
    parameters = replace(service.pipeline.defaults.sampling, **chosen)
    *history, last = messages
    if last["role"] != "user":
        raise InvalidRequestError(
            f"the last message has the role {shown(role)}; it must be 'user': the question", param=param
        )
    if not last["content"].strip():
        raise InvalidRequestError("the last message is empty; it must hold the question", param=param)
    if system is not None:
        history.insert(0, {"role": "system", "content": system})
    return Question(
        text=last["content"],
        documents=documents,
        history=history,
        seed=chosen.get("seed", 0),
        sampling=parameters,
        use_cache=use_cache,
        **chosen_methods(posfix or PosfixInput()),
    )


def reject_fields(extra: Mapping[str, Any] | None, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ``UnsupportedFeatureError`` for a field that would change the answer and is not supported.

    Args:
        extra: The fields of the request that its schema does not have.
        harmless: Unsupported fields, with the values that leave the answer unchanged.
    """
    for name, allowed in harmless.items():
        if extra and name in extra and extra[name] not in allowed:
            values = ", ".join(repr(value) for value in allowed if value is not None) or "null"
            raise UnsupportedFeatureError(
                f"{name} is not supported here; leave it out (allowed: {values})", param=name
            )


def stop_strings(stops: str | Sequence[str] | None, param: str) -> tuple[str, ...] | None:
    """Return the stop strings of a request, in its field ``param``; raise for too many and for a long one."""
    if stops is None:
        return None
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"{param} has {len(stops)} entries, at most {MAX_STOPS} are allowed", param=param)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"{param} holds a string of {longest} characters, at most {MAX_STOP_CHARACTERS} are allowed", param=param
        )
    return stops


def check_top_logprobs(count: int | None, param: str) -> None:
    """Raise for a number of alternatives, in the field ``param``, that is not between 0 and ``MOST_ALTERNATIVES``."""
    if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
        raise InvalidRequestError(f"{param}={count} must be between 0 and {MOST_ALTERNATIVES}", param=param)


class DocumentOutput(BaseModel):
    """A passage in the prompt."""

    id: str
    score: float | None
    position: int
    attention: float


class CitationOutput(BaseModel):
    """A span of the answer and its source documents."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: int
    end: int
    text: str
    document_ids: list[str]
    origin: Literal["quote", "attention"] = Field(
        alias="from",
        description="How that is known: 'quote', they hold the text word for word; 'attention', one of them dominated "
        "the attention while the sentence was written.",
    )


class DroppedOutput(BaseModel):
    """A document that is not in the prompt, and the reason."""

    id: str
    reason: str


class Provenance(BaseModel):
    """The sources of an answer: the fields that this service adds to the format of the dialect."""

    documents: list[DocumentOutput]
    citations: list[CitationOutput]
    dropped: list[DroppedOutput]
    warnings: list[str] = Field(description="What failed without failing the question, such as a reranker.")
    mitigation: str
    order: str
    cached: bool
    timings: dict[str, float]


def provenance(answer: Answer) -> Provenance:
    """Return the sources of ``answer``."""
    return Provenance(
        documents=[
            DocumentOutput(id=d.id, score=d.score, position=d.position, attention=d.attention)
            for d in answer.documents
        ],
        citations=[
            CitationOutput(start=c.start, end=c.end, text=c.text, document_ids=list(c.document_ids), origin=c.origin)
            for c in answer.citations
        ],
        dropped=[DroppedOutput(id=identity, reason=reason) for identity, reason in answer.dropped],
        warnings=list(answer.warnings),
        mitigation=answer.mitigation,
        order=answer.order,
        cached=answer.cached,
        timings=dict(answer.timings),
    )
