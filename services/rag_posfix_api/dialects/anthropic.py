"""Anthropic messages, with documents and citations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, Tag

from rag_posfix.contracts.answer import Answer, AnswerChunk, Citation, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.parameters import shown
from rag_posfix.pipeline.citations import PassageWords
from rag_posfix_api.dialects.answering import (
    AnswerRenderer,
    Provenance,
    build_question,
    chat_route,
    provenance,
    reject_fields,
    stop_strings,
)
from rag_posfix_api.dialects.errors import ANTHROPIC
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
from rag_posfix_api.http.json_bodies import CleanRoute, event, typed_event
from rag_posfix_api.runtime.service import Service


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


class AnthropicBlock(RequestModel):
    """A part of a message: text, or a document to answer from."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [_kind("text", "text", {"type": "string"}), _kind("document", "source", {"type": "object"})]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", "document"]})
    text: str | None = None
    source: DocumentSource | None = None
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


SEPARATOR = "\n"  # between the blocks of a document of type ``content``


class Location(BaseModel):
    """A passage that a text block is from, and the characters of the whole answer that it supports."""

    cited_text: str
    document_index: int = Field(description="Counts the document blocks of the request, from 0.")
    document_title: str | None
    file_id: None = None
    answer_start_index: int = Field(description="First character in the answer: all text blocks joined.")
    answer_end_index: int = Field(description="Character after the last in the answer.")


class CharLocation(Location):
    """Characters of a plain text document, counted in code points."""

    type: Literal["char_location"] = "char_location"
    start_char_index: int
    end_char_index: int


class BlockLocation(Location):
    """Blocks of a document of type ``content``."""

    type: Literal["content_block_location"] = "content_block_location"
    start_block_index: int
    end_block_index: int


class TextBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[CharLocation | BlockLocation] | None = None


@dataclass(frozen=True, slots=True)
class CitableDocument:
    """A document block of a request.

    Attributes:
        text: Its text, without the context.
        blocks: The blocks that ``text`` joins, of a document that is cited by blocks; else None.
        enabled: Whether it may be cited.
    """

    id: str
    title: str | None
    text: str
    blocks: tuple[str, ...] | None
    enabled: bool


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
    stop_reason: Literal["end_turn", "max_tokens"]
    stop_sequence: None = None
    usage: AnthropicUsage
    posfix: Provenance = Field(description="What this service adds to Anthropic's API.")


# Unsupported fields that would change the answer, with the values that leave it unchanged.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, {"type": "none"}, {"type": "auto"}),
    "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []),
    "container": (None,),
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
        if block.type == "document" and field != "system":
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
    blocks = _source_blocks(block.source, index)
    return CitableDocument(
        id=f"doc_{index}",
        title=block.title,
        text=SEPARATOR.join(blocks),
        blocks=None if block.source is None or block.source.type == "text" else blocks,
        enabled=isinstance(block.citations, CitationsConfig) and bool(block.citations.enabled),
    )


def _source_blocks(source: DocumentSource | None, index: int) -> tuple[str, ...]:
    if source is None:
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


def cited_blocks(answer: Answer, documents: Sequence[CitableDocument]) -> list[TextBlock]:
    """Return the answer in blocks: each quote of a document is one, with its citations, and so is text between."""
    blocks = []
    written = 0
    for quote, cited in _quotes(answer, documents):
        if quote.start > written:
            blocks.append(TextBlock(text=answer.text[written : quote.start]))
        blocks.append(TextBlock(text=quote.text, citations=cited))
        written = quote.end
    if written < len(answer.text) or not blocks:
        blocks.append(TextBlock(text=answer.text[written:]))
    return blocks


def _quotes(
    answer: Answer, documents: Sequence[CitableDocument]
) -> list[tuple[Citation, list[CharLocation | BlockLocation]]]:
    """Return the quotes that have a citation. Sentences known by attention have no span in a document."""
    indices = {document.id: index for index, document in enumerate(documents) if document.enabled}
    words: dict[int, PassageWords] = {}
    quotes = []
    for citation in answer.citations:
        if citation.origin != "quote":
            continue
        cited = []
        for index in sorted(indices[name] for name in citation.document_ids if name in indices):
            if index not in words:
                words[index] = PassageWords(documents[index].text)
            span = words[index].find(citation.text)
            if span is not None:  # else the quote is of the context
                cited.append(_location(documents[index], index, span, citation))
        if cited:
            quotes.append((citation, cited))
    return quotes


def _location(
    document: CitableDocument, index: int, span: tuple[int, int], citation: Citation
) -> CharLocation | BlockLocation:
    start, end = span
    shared = {
        "document_index": index,
        "document_title": document.title,
        "answer_start_index": citation.start,
        "answer_end_index": citation.end,
    }
    if document.blocks is None:
        text = document.text[start:end]
        return CharLocation(**shared, cited_text=text, start_char_index=start, end_char_index=end)
    starts = list(accumulate((len(block) + len(SEPARATOR) for block in document.blocks), initial=0))
    first = sum(begin <= start for begin in starts) - 1
    last = sum(begin < end for begin in starts)
    text = "".join(document.blocks[first:last])
    return BlockLocation(**shared, cited_text=text, start_block_index=first, end_block_index=last)


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
            usage=_usage(answer),
            posfix=provenance(answer),
        ).model_dump()

    def opening(self) -> Iterator[bytes]:
        """Yield the head of the message; its token counts are known at the end."""
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        yield typed_event("message_start", message=message)
        yield typed_event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        if chunk.text:
            yield typed_event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})
        if chunk.answer is None:
            return
        for location in [location for _, cited in _quotes(chunk.answer, self._documents) for location in cited]:
            delta = {"type": "citations_delta", "citation": location.model_dump()}
            yield typed_event("content_block_delta", index=0, delta=delta)
        yield typed_event("content_block_stop", index=0)
        yield typed_event(
            "message_delta",
            delta={"stop_reason": _stop_reason(chunk.answer), "stop_sequence": None},
            usage=_usage(chunk.answer).model_dump(),
            posfix=provenance(chunk.answer).model_dump(),
        )

    def closing(self) -> Iterator[bytes]:
        yield typed_event("message_stop")

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield event(ANTHROPIC(problem), "error")


def _stop_reason(answer: Answer) -> Literal["end_turn", "max_tokens"]:
    # Which stop string ended an answer is not known here: an end by one is an end of turn.
    return "max_tokens" if answer.finish_reason == "length" else "end_turn"


def _usage(answer: Answer) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=answer.usage.prompt_tokens - answer.usage.cached_tokens,
        cache_read_input_tokens=answer.usage.cached_tokens,
        output_tokens=answer.usage.completion_tokens,
    )


PATH = "/v1/messages"

router = APIRouter(route_class=CleanRoute)


@chat_route(router, PATH, ANTHROPIC, "create_message", AnthropicResponse)
def create_message(body: AnthropicRequest, service: Service) -> tuple[Question, AnswerRenderer]:
    """Answer the last message from the document blocks of the request, or from retrieved passages."""
    service.check_model(body.model)
    reject_fields(body.model_extra, _UNSUPPORTED)
    contents = [message.content for message in body.messages if not isinstance(message.content, str)]
    blocks = [block for content in contents for block in content if block.type == "document"]
    check_count(len(blocks), service.limits.max_documents, "messages")
    citable = [_citable(block, index) for index, block in enumerate(blocks)]
    documents = [
        Document(
            id=document.id,
            page_content=document.text if block.context is None else f"{block.context}\n{document.text}",
            metadata={} if document.title is None else {"title": document.title},
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
    return question, MessageRenderer(service.identifiers.new(), service.model_id, citable)
