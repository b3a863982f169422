"""Parses a messages request into a question for the pipeline. Unsupported parts of the wire format are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document

from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import Sampling
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.anthropic.citations import SEPARATOR, CitableDocument
from rag_posfix_api.dialects.anthropic.schemas import (
    AnthropicBlock,
    AnthropicMessage,
    AnthropicRequest,
    CitationsConfig,
    DocumentSource,
)
from rag_posfix_api.dialects.conversation import refuse_fields
from rag_posfix_api.dialects.documents import check_count
from rag_posfix_api.dialects.questions import build_question, sampling_with, stop_strings
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["to_question"]

# Fields that would change the answer, with the values that ask for what happens anyway.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, {"type": "none"}, {"type": "auto"}),
    "thinking": (None, {"type": "disabled"}),
    "mcp_servers": (None, []),
    "container": (None,),
}


def to_question(
    body: AnthropicRequest, defaults: Sampling, max_documents: int
) -> tuple[Question, tuple[CitableDocument, ...]]:
    """Return the question of a messages request, and its document blocks in their order.

    Args:
        body: The request.
        defaults: Default sampling parameters.
        max_documents: Maximum number of documents.

    Raises:
        InvalidRequestError: a field has a value that is not allowed.
        UnsupportedFeatureError: a field needs a feature that is not supported.
        TooManyDocumentsError: there are too many documents.
        ConfigError: a sampling parameter is out of range.
    """
    refuse_fields(body.model_extra, _REFUSED)
    blocks = [block for message in body.messages for block in _documents_of(message)]
    check_count(len(blocks), max_documents, "messages")
    citable = tuple(_citable(block, index) for index, block in enumerate(blocks))
    documents = [_document(one, block.context) for one, block in zip(citable, blocks, strict=True)]
    question = build_question(
        [_chat_message(message, index) for index, message in enumerate(body.messages)],
        sampling_with(
            defaults,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=stop_strings(body.stop_sequences, "stop_sequences"),
        ),
        documents or None,  # without any, they are retrieved
        body.posfix,
        role=body.messages[-1].role,
        system=None if body.system is None else _text(body.system, "system"),
    )
    return question, citable


def _chat_message(message: AnthropicMessage, index: int) -> ChatMessage:
    if message.role not in ("user", "assistant", "system"):
        raise UnsupportedFeatureError(
            f"messages[{index}]: role {shown(message.role)} is not supported; use user or assistant", param="messages"
        )
    return {"role": message.role, "content": _text(message.content, f"messages[{index}]")}


def _text(content: str | Sequence[AnthropicBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for block in content:
        if block.type == "document" and place != "system":
            continue
        if block.type != "text" or block.text is None:
            raise UnsupportedFeatureError(
                f"{place}: a block of type {shown(block.type)} is not supported; use "
                '{"type": "text", "text": ...} or a document with its text',
                param=place.partition("[")[0],
            )
        texts.append(block.text)
    return "\n".join(texts)


def _documents_of(message: AnthropicMessage) -> list[AnthropicBlock]:
    return [] if isinstance(message.content, str) else [one for one in message.content if one.type == "document"]


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
        parts = [source.content] if isinstance(source.content, str) else [part.text for part in source.content]
        if None not in parts:
            return tuple(part for part in parts if part is not None)
    raise UnsupportedFeatureError(
        f"document {index}: a source of type {shown(source.type)} without text is not supported; use "
        '{"type": "text", "media_type": "text/plain", "data": ...}',
        param="messages",
    )


def _document(citable: CitableDocument, context: str | None) -> Document:
    text = citable.text if context is None else f"{context}\n{citable.text}"
    return Document(
        page_content=text, metadata={} if citable.title is None else {"title": citable.title}, id=citable.id
    )
