"""Anthropic messages, with documents and citations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, Tag
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.answering import (
    AnswerRenderer,
    Provenance,
    build_question,
    chat_route,
    pipeline_of,
    provenance,
    reject_fields,
    stop_strings,
)
from rag_posfix_api.dialects.anthropic_citations import (
    SEPARATOR,
    CitableDocument,
    TextBlock,
    cited_blocks,
    find_citations,
)
from rag_posfix_api.dialects.errors import ANSWERING, ANTHROPIC
from rag_posfix_api.dialects.requests import (
    EXAMPLE,
    Forms,
    Integer,
    PosfixInput,
    RequestModel,
    StopList,
    Temperature,
    TextOr,
    TopK,
    TopP,
    check_count,
    needs,
)
from rag_posfix_api.http.errors import InvalidRequestError, Problem, UnsupportedFeatureError
from rag_posfix_api.http.json_bodies import CleanRoute, SafeJSONResponse, event, typed_event
from rag_posfix_api.runtime.service import ReadyService, Service


def _kind(kind: str, field: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a part of one type, which needs one field."""
    return {"required": ["type", field], "properties": {"type": {"const": kind}, field: value}}


class CitationsConfig(RequestModel):
    """Whether a document may be cited."""

    enabled: bool | None = None


class SourceText(RequestModel):
    """A part of a document that is cited as a whole."""

    model_config = ConfigDict(json_schema_extra=needs("text", {"type": "string"}))

    type: str = Field(default="text", json_schema_extra={"enum": ["text"]})
    text: str | None = None


class DocumentSource(RequestModel):
    """The text of a document: ``data`` of type ``text``, or ``content`` of type ``content``."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "anyOf": [
                _kind("text", "data", {"type": "string"}),
                _kind("content", "content", {"type": ["string", "array"]}),
            ]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", "content"]})
    media_type: str | None = None
    data: str | None = None
    content: TextOr[SourceText] | None = None


_PASSAGES = ("document", "search_result")
"""Types of blocks to answer from."""


class AnthropicBlock(RequestModel):
    """A part of a message: text, or a document or search result to answer from."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [
                _kind("text", "text", {"type": "string"}),
                _kind("document", "source", {"type": "object"}),
                _kind("search_result", "content", {"type": "array"}),
            ]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", *_PASSAGES]})
    text: str | None = None
    source: (
        Annotated[Annotated[DocumentSource, Tag("object")] | Annotated[str, Tag("string")], Forms("object", "string")]
        | None
    ) = Field(default=None, description="Of a document: its text. Of a search result: its address.")
    content: TextOr[SourceText] | None = Field(default=None, description="The text of a search result.")
    title: str | None = None
    context: str | None = Field(default=None, description="Stands before the document's text, and is not cited.")
    citations: (
        Annotated[
            Annotated[CitationsConfig, Tag("object")] | Annotated[list[Any], Tag("array")], Forms("object", "array")
        ]
        | None
    ) = Field(default=None, description="Of a document: whether it may be cited. Of a text block: read over.")


class AnthropicMessage(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["user", "assistant"]})
    content: TextOr[AnthropicBlock]


def _texts_only(schema: dict[str, Any]) -> None:
    """Say that instructions have no documents."""
    for member in schema["anyOf"]:
        if "oneOf" in member or "anyOf" in member or member.get("type") == "array":
            text_block = {"type": "object", **_kind("text", "text", {"type": "string"})}
            member.clear()
            member["anyOf"] = [{"type": "string"}, {"type": "array", "items": text_block}]


class AnthropicRequest(RequestModel):
    """A request. Fields of Anthropic's API without effect here are ignored; ``parse`` refuses unsupported ones."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(examples=["default"], description="The served model, or 'default'.")
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: its text is the question."
    )
    max_tokens: Integer = Field(json_schema_extra={"minimum": 1})
    system: TextOr[AnthropicBlock] | None = Field(default=None, json_schema_extra=_texts_only)
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
    posfix: PosfixInput | None = Field(default=None, description="What this service adds to Anthropic's API.")


class AnthropicUsage(BaseModel):
    """Token counts. The prompt has the sum of the first two."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class AnthropicResponse(BaseModel):
    """A complete answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"]
    stop_sequence: str | None = None
    usage: AnthropicUsage
    posfix: Provenance = Field(description="What this service adds to Anthropic's API.")


# Unsupported fields that would change the answer, with the values that leave it unchanged.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, {"type": "none"}, {"type": "auto"}),
    "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []),
    "container": (None,),
    "output_format": (None,),
}


def _chat_message(message: AnthropicMessage, index: int) -> ChatMessage:
    if message.role not in ("user", "assistant", "system"):
        raise UnsupportedFeatureError(
            f"messages[{index}]: role {shown(message.role)} is not supported; use user or assistant", param="messages"
        )
    return {"role": message.role, "content": _text(message.content, f"messages[{index}]")}


def _text(content: str | Sequence[AnthropicBlock], field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block.type in _PASSAGES and field != "system":
            continue
        if block.type != "text" or block.text is None:
            raise UnsupportedFeatureError(
                f"{field}: a block of type {shown(block.type)} is not supported; use "
                '{"type": "text", "text": ...} or a document with its text',
                param=field.partition("[")[0],
            )
        texts.append(block.text)
    return "\n".join(texts)


def _citable(block: AnthropicBlock, index: int) -> CitableDocument:
    source, address = block.source, None
    if block.type == "search_result":
        address = source if isinstance(source, str) else ""
        source = DocumentSource(type="content", content=block.content)
    blocks = _source_blocks(source, index)
    return CitableDocument(
        id=f"doc_{index}",
        title=block.title,
        text=SEPARATOR.join(blocks),
        blocks=None if isinstance(source, DocumentSource) and source.type == "text" else blocks,
        enabled=isinstance(block.citations, CitationsConfig) and bool(block.citations.enabled),
        address=address,
    )


def _source_blocks(source: DocumentSource | str | None, index: int) -> tuple[str, ...]:
    if not isinstance(source, DocumentSource):
        raise InvalidRequestError(f"document {index} has no source; give its text", param="messages")
    if source.type == "text" and source.data is not None:
        return (source.data,)
    if source.type == "content" and source.content is not None:
        texts = [source.content] if isinstance(source.content, str) else [block.text for block in source.content]
        if None not in texts:
            return tuple(text for text in texts if text is not None)
    raise UnsupportedFeatureError(
        f"document {index}: a source of type {shown(source.type)} without text is not supported; use "
        '{"type": "text", "media_type": "text/plain", "data": ...}',
        param="messages",
    )


class MessageRenderer(AnswerRenderer):
    """Renders one message.

    A stream has one text block: which parts of an answer are quotes is known at its end. Its citations come after its
    text, each with the characters of the answer that it supports.
    """

    def __init__(self, identity: str, model: str, documents: Sequence[CitableDocument]) -> None:
        self._id = f"msg_{identity}"
        self._model = model
        self._documents = documents

    def whole(self, answer: Answer) -> dict[str, Any]:
        return AnthropicResponse(
            id=self._id,
            model=self._model,
            content=cited_blocks(answer, self._documents),
            stop_reason=_stop_reason(answer),
            stop_sequence=answer.stop_string,
            usage=_usage(answer),
            posfix=provenance(answer),
        ).model_dump()

    def opening(self, first: AnswerChunk | None) -> Iterator[bytes]:
        """Yield the head of the message. Which input tokens were cached is known at the end."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0 if first is None else first.prompt_tokens, "output_tokens": 0},
        }
        yield typed_event("message_start", message=message)
        yield typed_event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        if chunk.text:
            yield typed_event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})
        if chunk.answer is None:
            return
        for location in [location for _, cited in find_citations(chunk.answer, self._documents) for location in cited]:
            delta = {"type": "citations_delta", "citation": location.model_dump()}
            yield typed_event("content_block_delta", index=0, delta=delta)
        yield typed_event("content_block_stop", index=0)
        yield typed_event(
            "message_delta",
            delta={"stop_reason": _stop_reason(chunk.answer), "stop_sequence": chunk.answer.stop_string},
            usage=_usage(chunk.answer).model_dump(),
            posfix=provenance(chunk.answer).model_dump(),
        )

    def closing(self) -> Iterator[bytes]:
        yield typed_event("message_stop")

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield event(ANTHROPIC(problem), "error")


def _stop_reason(answer: Answer) -> Literal["end_turn", "max_tokens", "stop_sequence"]:
    if answer.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if answer.finish_reason == "length" else "end_turn"


def _usage(answer: Answer) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=answer.usage.prompt_tokens - answer.usage.cached_tokens,
        cache_read_input_tokens=answer.usage.cached_tokens,
        output_tokens=answer.usage.completion_tokens,
    )


PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"

router = APIRouter(route_class=CleanRoute)


@chat_route(router, PATH, ANTHROPIC, "create_message", AnthropicResponse)
def create_message(body: AnthropicRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the last message from the document blocks of the request, or from retrieved passages."""
    question, citable = _question(body, service)
    return question, MessageRenderer(service.identifiers.new(), service.model_id, citable)


class CountTokensRequest(AnthropicRequest):
    """As a request for a message, without ``max_tokens``."""

    max_tokens: Integer = Field(default=1, json_schema_extra={"minimum": 1})


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


@router.post(COUNT_PATH, tags=["chat"], response_model=TokenCount, responses=ANTHROPIC.responses(*ANSWERING))
async def count_tokens(body: CountTokensRequest, request: Request, service: ReadyService) -> Response:
    """Count the tokens of the prompt that the model would read: with retrieved passages if the request has none."""
    question, _ = _question(body, service)
    pipeline = pipeline_of(service, question, None if body.posfix is None else body.posfix.collection)
    question = replace(question, use_cache=False)
    preview = await service.chat.run(request.receive, lambda: pipeline().preview(question))
    return SafeJSONResponse({"input_tokens": preview.tokens})


def _question(body: AnthropicRequest, service: Service) -> tuple[Question, list[CitableDocument]]:
    service.check_model(body.model)
    reject_fields(body.model_extra, _UNSUPPORTED)
    output = (body.model_extra or {}).get("output_config")
    if isinstance(output, dict):  # its "effort" is harmless
        reject_fields({"output_config.format": output.get("format")}, {"output_config.format": (None,)})
    contents = [message.content for message in body.messages if not isinstance(message.content, str)]
    blocks = [block for content in contents for block in content if block.type in _PASSAGES]
    check_count(len(blocks), service.limits.max_documents, "messages")
    citable = [_citable(block, index) for index, block in enumerate(blocks)]
    documents = [
        Document(
            id=document.id,
            page_content=document.text if block.context is None else f"{block.context}\n{document.text}",
            metadata={name: text for name, text in (("title", document.title), ("source", document.address)) if text},
        )
        for document, block in zip(citable, blocks, strict=True)
    ]
    question = build_question(
        service,
        [_chat_message(message, index) for index, message in enumerate(body.messages)],
        documents or None,  # without any, they are retrieved
        body.posfix,
        role=body.messages[-1].role,
        system=None if body.system is None else _text(body.system, "system"),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=stop_strings(body.stop_sequences, "stop_sequences"),
    )
    return question, citable
