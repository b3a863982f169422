"""Cohere chat with documents and citations, version 2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from rag_posfix.contracts.answer import Answer, AnswerChunk, AnswerDocument, Question
from rag_posfix_api.dialects.answering import (
    AnswerRenderer,
    Provenance,
    build_question,
    chat_route,
    provenance,
)
from rag_posfix_api.dialects.requests import (
    AnswerRequest,
    DocumentObject,
    Documents,
    MaxTokens,
    Messages,
    RequestModel,
    Seed,
    StopList,
    Temperature,
    TopK,
    TopP,
    Unsupported,
    chat_message,
    to_documents,
)
from rag_posfix_api.http.errors import COHERE, Problem
from rag_posfix_api.http.middleware import CleanRoute, typed_event
from rag_posfix_api.runtime.service import Service

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS"]


class CitationOptions(RequestModel):
    """Options of citations."""

    mode: str | None = Field(default=None, description="'OFF' or 'DISABLED' gives none; every other mode is the same.")


class CohereChatRequest(AnswerRequest):
    """A request. Fields of Cohere's API without effect here are ignored; unsupported ones are refused."""

    unsupported: ClassVar[Unsupported] = {
        "tools": (None, []),
        "tool_choice": (None, "NONE"),
        "response_format": (None, {"type": "text"}),
        "logprobs": (None, False),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
        "thinking": (None, {"type": "disabled"}),
    }

    model: str = Field(examples=["default"], description="The served model, or 'default'.")
    messages: Messages
    documents: Documents | None = Field(
        default=None, description="The passages to answer from. Without any they are retrieved."
    )
    citation_options: CitationOptions | None = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: Annotated[TopP, Field(alias="p")] = None
    top_k: Annotated[TopK, Field(alias="k", description="Samples from this many tokens.")] = None
    seed: Seed | None = None
    stop: StopList | None = Field(default=None, alias="stop_sequences")

    @property
    def cites(self) -> bool:
        """Whether the answer has citations."""
        mode = self.citation_options.mode if self.citation_options is not None else None
        return (mode or "").upper() not in ("OFF", "DISABLED")


class CohereSource(BaseModel):
    """A document that is cited, with the fields that the request gave it."""

    type: Literal["document"] = "document"
    id: str
    document: dict[str, Any]


class CohereCitation(BaseModel):
    """A span of the answer, in code points, and its sources."""

    start: int
    end: int
    text: str
    sources: list[CohereSource]
    content_index: int = 0
    type: Literal["TEXT_CONTENT"] = "TEXT_CONTENT"


class CohereText(BaseModel):
    """The text of the answer."""

    type: Literal["text"] = "text"
    text: str


class CohereMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: list[CohereText]
    citations: list[CohereCitation] | None


class CohereTokens(BaseModel):
    """Token counts."""

    input_tokens: int
    output_tokens: int


class CohereUsage(BaseModel):
    """Token counts; the same ones as Cohere would bill them."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereChatResponse(BaseModel):
    """A complete answer."""

    id: str
    finish_reason: FinishReason
    message: CohereMessage
    usage: CohereUsage
    posfix: Provenance = Field(description="What this service adds to Cohere's API.")


def _fields(document: str | DocumentObject) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    if document.data is not None:
        return document.data.model_dump(exclude_none=True)
    return document.model_dump(include={"title", "text"}, exclude_none=True)


class ChatRenderer(AnswerRenderer):
    """Renders one answer.

    Args:
        documents: The fields of the documents of the request, by id.
        cites: Whether the answer has citations.
    """

    def __init__(self, identity: str, documents: Mapping[str, Mapping[str, Any]], *, cites: bool) -> None:
        self._id = identity
        self._documents = documents
        self._cites = cites

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = CohereMessage(content=[CohereText(text=answer.text)], citations=self._citations(answer) or None)
        response = CohereChatResponse(
            id=self._id,
            finish_reason=_finish_reason(answer),
            message=message,
            usage=_usage(answer),
            posfix=provenance(answer),
        )
        return response.model_dump()

    def opening(self, first: AnswerChunk | None) -> Iterator[bytes]:
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        yield typed_event("message-start", id=self._id, delta={"message": message})
        yield typed_event("content-start", index=0, delta={"message": {"content": {"type": "text", "text": ""}}})

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        if chunk.text:
            yield typed_event("content-delta", index=0, delta={"message": {"content": {"text": chunk.text}}})
        if chunk.answer is None:
            return
        for index, citation in enumerate(self._citations(chunk.answer)):
            yield typed_event("citation-start", index=index, delta={"message": {"citations": citation.model_dump()}})
            yield typed_event("citation-end", index=index)
        yield typed_event("content-end", index=0)
        delta = {"finish_reason": _finish_reason(chunk.answer), "usage": _usage(chunk.answer).model_dump()}
        yield typed_event("message-end", id=self._id, delta=delta, posfix=provenance(chunk.answer).model_dump())

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield typed_event("message-end", id=self._id, delta={"finish_reason": "ERROR", "error": problem.message})

    def _citations(self, answer: Answer) -> list[CohereCitation]:
        """Return quotes, and sentences known by attention or weight that hold no quote: spans do not overlap."""
        if not self._cites:
            return []
        retrieved = {document.id: _retrieved_fields(document) for document in answer.documents}
        quotes = [(quote.start, quote.end) for quote in answer.citations if quote.origin == "quote"]
        citations = []
        for span in answer.citations:
            overlaps = any(start < span.end and span.start < end for start, end in quotes)
            if span.origin == "quote" or not overlaps:
                sources = [
                    self._source(identity, retrieved.get(identity, {}) | ({} if page is None else {"page": page}))
                    for identity, page in zip_longest(span.document_ids, span.pages)
                ]
                citations.append(CohereCitation(start=span.start, end=span.end, text=span.text, sources=sources))
        return citations

    def _source(self, identity: str, retrieved: Mapping[str, Any]) -> CohereSource:
        fields = self._documents.get(identity, retrieved)
        return CohereSource(id=identity, document={"id": identity, **fields})


def _retrieved_fields(document: AnswerDocument) -> dict[str, Any]:
    fields = {"title": document.title, "text": document.text, "source": document.source, "page": document.page}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _finish_reason(answer: Answer) -> FinishReason:
    if answer.stop_string is not None:
        return "STOP_SEQUENCE"
    return "MAX_TOKENS" if answer.finish_reason == "length" else "COMPLETE"


def _usage(answer: Answer) -> CohereUsage:
    tokens = CohereTokens(input_tokens=answer.usage.prompt_tokens, output_tokens=answer.usage.completion_tokens)
    return CohereUsage(billed_units=tokens, tokens=tokens, cached_tokens=answer.usage.cached_tokens)


PATH = "/v2/chat"

router = APIRouter(route_class=CleanRoute)


@chat_route(router, PATH, COHERE, "cohere_chat", CohereChatResponse)
def chat(body: CohereChatRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the last message from documents: those of the request, or retrieved ones, with citations."""
    inputs = body.documents or []
    documents = to_documents(inputs, service.limits.max_documents)
    question = build_question(
        service,
        body,
        [chat_message(message, index) for index, message in enumerate(body.messages)],
        documents or None,  # Cohere's clients send an empty list for none
        role=body.messages[-1].role,
    )
    fields = {document.id or "": _fields(source) for document, source in zip(documents, inputs, strict=True)}
    return question, ChatRenderer(service.identifiers.new(), fields, cites=body.cites)
