"""Anthropic messages, with documents and citations.

Documents of Anthropic messages, and citations of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, Tag
from starlette.responses import Response

from rag_posfix.contracts.answer import Answer, AnswerChunk, Citation, Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.tools import ToolCall, ToolUse
from rag_posfix.parameters import shown
from rag_posfix.pipeline.citations import PassageSentences
from rag_posfix_api.dialects.answering import (
    AnswerRenderer,
    AnyTool,
    Provenance,
    ToolTurns,
    build_question,
    chat_route,
    check_request,
    definition,
    pipeline_of,
    provenance,
    reject_fields,
    tool_use,
)
from rag_posfix_api.dialects.requests import (
    EXAMPLE,
    AnswerRequest,
    Forms,
    Integer,
    Part,
    RequestModel,
    StopList,
    Temperature,
    TextOr,
    TopK,
    TopP,
    Unsupported,
    check_count,
)
from rag_posfix_api.http.errors import ANSWERING, ANTHROPIC, Problem, RequestError
from rag_posfix_api.http.middleware import CleanRoute, SafeJSONResponse, event, typed_event
from rag_posfix_api.runtime.service import ReadyCall, Service

SEPARATOR = "\n"  # between the blocks of a document of type ``content``


class CitedSpan(BaseModel):
    """A passage that a text block is from, and the characters of the whole answer that it supports."""

    cited_text: str
    answer_start_index: int = Field(description="First character in the answer: all text blocks joined.")
    answer_end_index: int = Field(description="Character after the last in the answer.")


class Location(CitedSpan):
    """A passage of a document block."""

    document_index: int = Field(description="Counts the document blocks of the request, from 0.")
    document_title: str | None
    file_id: None = None


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


class SearchResultLocation(CitedSpan):
    """Blocks of a search result."""

    type: Literal["search_result_location"] = "search_result_location"
    search_result_index: int = Field(description="Counts the search results of the request, from 0.")
    source: str
    title: str | None
    start_block_index: int
    end_block_index: int


AnyLocation = CharLocation | BlockLocation | SearchResultLocation


class TextBlock(BaseModel):
    """A part of the answer."""

    type: Literal["text"] = "text"
    text: str
    citations: list[AnyLocation] | None = None


@dataclass(frozen=True, slots=True)
class CitableDocument:
    """A document block of a request.

    Attributes:
        text: Its text, without the context.
        blocks: The blocks that ``text`` joins, of a document that is cited by blocks; else None.
        enabled: Whether it may be cited.
        address: The address of a search result; None for a document.
    """

    id: str
    title: str | None
    text: str
    blocks: tuple[str, ...] | None
    enabled: bool
    address: str | None = None


def cited_blocks(answer: Answer, documents: Sequence[CitableDocument]) -> list[TextBlock]:
    """Return the answer in blocks: each quote of a document is one, with its citations, and so is text between."""
    blocks = []
    written = 0
    for quote, cited in find_citations(answer, documents):
        if quote.start > written:
            blocks.append(TextBlock(text=answer.text[written : quote.start]))
        blocks.append(TextBlock(text=quote.text, citations=cited))
        written = quote.end
    if written < len(answer.text) or not blocks:
        blocks.append(TextBlock(text=answer.text[written:]))
    return blocks


def find_citations(answer: Answer, documents: Sequence[CitableDocument]) -> list[tuple[Citation, list[AnyLocation]]]:
    """Return the quotes that have a citation. Sentences known by attention or weight have no span in a document.

    Without ``documents`` of the request the retrieved passages are cited, each as a search result of one block.
    """
    documents = documents or [
        CitableDocument(
            passage.id, passage.title, passage.text, (passage.text,), bool(passage.text), passage.source or passage.id
        )
        for passage in answer.documents
    ]
    indices = {document.id: index for index, document in enumerate(documents) if document.enabled}
    sentences: dict[int, PassageSentences] = {}
    quotes = []
    for citation in answer.citations:
        if citation.origin != "quote":
            continue
        cited = []
        for index in sorted(indices[name] for name in citation.document_ids if name in indices):
            if index not in sentences:
                sentences[index] = PassageSentences(documents[index].text)
            span = sentences[index].find(citation.text)
            if span is not None:  # else the quote is of the context
                cited.append(_location(documents, index, span, citation))
        if cited:
            quotes.append((citation, cited))
    return quotes


def _location(
    documents: Sequence[CitableDocument], index: int, span: tuple[int, int], citation: Citation
) -> AnyLocation:
    (start, end), document = span, documents[index]
    is_result = document.address is not None
    number = sum((other.address is not None) == is_result for other in documents[:index])
    shared: dict[str, Any] = {"answer_start_index": citation.start, "answer_end_index": citation.end}
    if document.blocks is None:
        text = document.text[start:end]
        place = {"document_index": number, "document_title": document.title}
        return CharLocation(**shared, **place, cited_text=text, start_char_index=start, end_char_index=end)
    starts = list(accumulate((len(block) + len(SEPARATOR) for block in document.blocks), initial=0))
    first = sum(begin <= start for begin in starts) - 1
    last = sum(begin < end for begin in starts)
    text = "".join(document.blocks[first:last])
    shared |= {"cited_text": text, "start_block_index": first, "end_block_index": last}
    if document.address is not None:
        return SearchResultLocation(
            **shared, search_result_index=number, source=document.address, title=document.title
        )
    return BlockLocation(**shared, document_index=number, document_title=document.title)


def _kind(kind: str, field: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a part of one type, which needs one field."""
    return {"required": ["type", field], "properties": {"type": {"const": kind}, field: value}}


class CitationsConfig(RequestModel):
    """Whether a document may be cited."""

    enabled: bool | None = None


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
    content: TextOr[Part] | None = None


_PASSAGES = ("document", "search_result")
"""Types of blocks to answer from."""


class AnthropicBlock(RequestModel):
    """A part of a message: text, a document or search result to answer from, a call of a tool, or its result."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "anyOf": [
                _kind("text", "text", {"type": "string"}),
                _kind("document", "source", {"type": "object"}),
                _kind("search_result", "content", {"type": "array"}),
                _kind("tool_use", "id", {"type": "string"}),
                _kind("tool_result", "tool_use_id", {"type": "string"}),
            ]
        },
    )

    type: str = Field(json_schema_extra={"enum": ["text", *_PASSAGES, "tool_use", "tool_result"]})
    text: str | None = None
    source: (
        Annotated[Annotated[DocumentSource, Tag("object")] | Annotated[str, Tag("string")], Forms("object", "string")]
        | None
    ) = Field(default=None, description="Of a document: its text. Of a search result: its address.")
    content: TextOr[Part] | None = Field(
        default=None, description="The text of a search result, or of the result of a tool."
    )
    title: str | None = None
    context: str | None = Field(default=None, description="Stands before the document's text, and is not cited.")
    citations: (
        Annotated[
            Annotated[CitationsConfig, Tag("object")] | Annotated[list[Any], Tag("array")], Forms("object", "array")
        ]
        | None
    ) = Field(default=None, description="Of a document: whether it may be cited. Of a text block: read over.")
    id: str | None = Field(default=None, description="Of a call.")
    name: str | None = Field(default=None, description="The tool that is called.")
    input: dict[str, Any] | None = Field(default=None, description="The arguments of a call.")
    tool_use_id: str | None = Field(default=None, description="The call whose result it is.")
    is_error: bool | None = Field(default=None, description="Whether the call failed.")


class AnthropicMessage(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["user", "assistant"]})
    content: TextOr[AnthropicBlock]


class AnthropicTool(AnyTool):
    """A tool of the client; tools that a server runs are refused."""

    model_config = ConfigDict(json_schema_extra={"required": ["name", "input_schema"]})

    type: str | None = Field(default=None, json_schema_extra={"enum": ["custom", None]})
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = Field(default=None, description="A JSON schema of type object.")

    def definition(self) -> dict[str, Any] | None:
        is_own = self.type in (None, "custom")
        return definition(self.name, self.description, self.input_schema) if is_own else None


class AnthropicToolChoice(RequestModel):
    """Whether a tool is called: ``auto``, ``any``, ``tool`` (that of this name), or ``none``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def _texts_only(schema: dict[str, Any]) -> None:
    """Say that instructions have no documents."""
    for member in schema["anyOf"]:
        if "oneOf" in member or "anyOf" in member or member.get("type") == "array":
            text_block = {"type": "object", **_kind("text", "text", {"type": "string"})}
            member.clear()
            member["anyOf"] = [{"type": "string"}, {"type": "array", "items": text_block}]


class AnthropicRequest(AnswerRequest):
    """A request. Fields of Anthropic's API without effect here are ignored; unsupported ones are refused."""

    unsupported: ClassVar[Unsupported] = {
        "thinking": (None, {"type": "disabled"}, {"type": "adaptive"}),
        "mcp_servers": (None, []),
        "container": (None,),
        "output_format": (None,),
    }

    model: str = Field(examples=["default"], description="The served model, or 'default'.")
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True)] = Field(
        min_length=1, examples=[EXAMPLE], description="The last one must be the user's: its text is the question."
    )
    max_tokens: Integer = Field(json_schema_extra={"minimum": 1})
    system: TextOr[AnthropicBlock] | None = Field(default=None, json_schema_extra=_texts_only)
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stop: StopList | None = Field(default=None, alias="stop_sequences")
    tools: list[AnthropicTool] | None = Field(
        default=None, description="Tools that may be called, where the chat template of the model takes tools."
    )
    tool_choice: AnthropicToolChoice | None = None


class AnthropicUsage(BaseModel):
    """Token counts. The prompt has the sum of the first two."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicResponse(BaseModel):
    """A complete answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: StopReason
    stop_sequence: str | None = None
    usage: AnthropicUsage
    posfix: Provenance = Field(description="What this service adds to Anthropic's API.")


def _conversation(messages: Sequence[AnthropicMessage]) -> list[ChatMessage]:
    """Return messages for the pipeline: each result of a tool is one, before the text of its message."""
    turns = ToolTurns()
    conversation: list[ChatMessage] = []
    for index, message in enumerate(messages):
        field, content = f"messages[{index}]", message.content
        if message.role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{field}: role {shown(message.role)} is not supported; use user or assistant",
                param="messages",
                code="unsupported",
            )
        kind = {"assistant": "tool_use", "user": "tool_result"}.get(message.role)
        blocks = [] if isinstance(content, str) else [block for block in content if block.type == kind]
        rest = content if isinstance(content, str) else [block for block in content if block.type != kind]
        text = _text(rest, field)
        if blocks and kind == "tool_use":
            calls = [(block.id, block.name or "", block.input or {}) for block in blocks]
            conversation.append(turns.called(text, calls, field))
            continue
        conversation += [turns.result(_result_text(block, field), block.tool_use_id or "", field) for block in blocks]
        if not blocks or text:
            conversation.append({"role": message.role, "content": text})
    return conversation


def _result_text(block: AnthropicBlock, field: str) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        texts = [part.text for part in content if part.type == "text" and part.text is not None]
        if len(texts) < len(content):
            raise RequestError(f"{field}: the result of a tool must be text", param="messages", code="unsupported")
        content = "\n".join(texts)
    return f"Error: {content}" if block.is_error else content


def _tools(body: AnthropicRequest) -> ToolUse | None:
    choice = body.tool_choice or AnthropicToolChoice(type="auto")
    name = {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)
    return tool_use(body.tools, name, parallel=not choice.disable_parallel_tool_use)


def _text(content: str | Sequence[AnthropicBlock], field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block.type in _PASSAGES and field != "system":
            continue
        if block.type != "text" or block.text is None:
            raise RequestError(
                f"{field}: a block of type {shown(block.type)} is not supported; use "
                '{"type": "text", "text": ...} or a document with its text',
                param=field.partition("[")[0],
                code="unsupported",
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
        raise RequestError(f"document {index} has no source; give its text", param="messages")
    if source.type == "text" and source.data is not None:
        return (source.data,)
    if source.type == "content" and source.content is not None:
        texts = [source.content] if isinstance(source.content, str) else [block.text for block in source.content]
        if None not in texts:
            return tuple(text for text in texts if text is not None)
    raise RequestError(
        f"document {index}: a source of type {shown(source.type)} without text is not supported; use "
        '{"type": "text", "media_type": "text/plain", "data": ...}',
        param="messages",
        code="unsupported",
    )


class MessageRenderer(AnswerRenderer):
    """Renders one message.

    A stream has one text block: which parts of an answer are quotes is known at its end. Its citations come after its
    text, each with the characters of the answer that it supports. Calls of tools follow, a block each. An answer that
    only calls tools has no text block.
    """

    def __init__(self, identity: str, model: str, documents: Sequence[CitableDocument]) -> None:
        self._id = f"msg_{identity}"
        self._model = model
        self._documents = documents
        self._has_text = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        return AnthropicResponse(
            id=self._id,
            model=self._model,
            content=_blocks(answer, self._documents),
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

    def piece(self, chunk: AnswerChunk) -> Iterator[bytes]:
        is_empty = chunk.answer is not None and not chunk.answer.tool_calls  # it has one block all the same
        if (chunk.text or is_empty) and not self._has_text:
            self._has_text = True
            yield typed_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if chunk.text:
            yield typed_event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})
        if chunk.answer is None:
            return
        for location in [location for _, cited in find_citations(chunk.answer, self._documents) for location in cited]:
            delta = {"type": "citations_delta", "citation": location.model_dump()}
            yield typed_event("content_block_delta", index=0, delta=delta)
        if self._has_text:
            yield typed_event("content_block_stop", index=0)
        for index, call in enumerate(chunk.answer.tool_calls, start=int(self._has_text)):
            yield from _call_events(index, call)
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


def _blocks(answer: Answer, documents: Sequence[CitableDocument]) -> list[TextBlock | ToolUseBlock]:
    calls = [ToolUseBlock(id=call.id, name=call.name, input=dict(call.arguments)) for call in answer.tool_calls]
    texts = [] if calls and not answer.text else cited_blocks(answer, documents)
    return [*texts, *calls]


def _call_events(index: int, call: ToolCall) -> Iterator[bytes]:
    block = ToolUseBlock(id=call.id, name=call.name, input={})  # the arguments follow, as text
    yield typed_event("content_block_start", index=index, content_block=block.model_dump())
    delta = {"type": "input_json_delta", "partial_json": call.arguments_text}
    yield typed_event("content_block_delta", index=index, delta=delta)
    yield typed_event("content_block_stop", index=index)


def _stop_reason(answer: Answer) -> StopReason:
    if answer.tool_calls:
        return "tool_use"
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
async def count_tokens(body: CountTokensRequest, call: ReadyCall) -> Response:
    """Count the tokens of the prompt that the model would read: with retrieved passages if the request has none."""
    service = call.service
    check_request(service, body)
    question, _ = _question(body, service)
    pipeline = pipeline_of(service, question, None if body.posfix is None else body.posfix.collection)
    question = replace(question, use_cache=False)
    preview = await call.compute(lambda: pipeline().preview(question))
    return SafeJSONResponse({"input_tokens": preview.tokens})


def _question(body: AnthropicRequest, service: Service) -> tuple[Question, list[CitableDocument]]:
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
        body,
        _conversation(body.messages),
        documents or None,  # without any, they are retrieved
        role=body.messages[-1].role,
        system=None if body.system is None else _text(body.system, "system"),
        tools=_tools(body),
    )
    return question, citable
