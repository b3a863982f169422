"""Converts documents to content blocks of a message, and messages to question, documents and history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from rag_posfix.errors import ConfigError

__all__ = ["Conversation", "document_block", "read_conversation"]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that ends with a question of the user.

    Attributes:
        question: The text of the human messages at the end of the conversation.
        documents: The documents in these messages.
        history: The messages before them, as ``{"role", "content"}``.
    """

    question: str
    documents: tuple[Document, ...]
    history: tuple[Mapping[str, str], ...]


def document_block(document: Document) -> dict[str, Any]:
    """Return ``document`` as a standard ``text-plain`` content block, its metadata (score included) in ``extras``."""
    block: dict[str, Any] = {
        "type": "text-plain",
        "mime_type": "text/plain",
        "text": document.page_content,
        "extras": {key: value for key, value in document.metadata.items() if key != "title"},
    }
    if document.id is not None:
        block["id"] = document.id
    if document.metadata.get("title"):
        block["title"] = str(document.metadata["title"])
    return block


def read_conversation(messages: Sequence[BaseMessage]) -> Conversation:
    """Return question, documents and history of a list of messages.

    A human message may contain text and documents, as blocks of three kinds: langchain's ``text-plain``, Cohere's
    ``{"type": "document", "document": {"data": {"text": ...}}}`` and Anthropic's ``{"type": "document", "source":
    {"type": "text", "data": ...}}``. Documents in earlier messages become part of the history's text.

    Args:
        messages: The messages; the last one is a human message.

    Raises:
        ConfigError: there is no message, the last one is not human, or a block is malformed.
    """
    if not messages:
        raise ConfigError("there are 0 messages; the last one must be a human message with the question")
    last = len(messages)
    while last > 0 and isinstance(messages[last - 1], HumanMessage):
        last -= 1
    if last == len(messages):
        raise ConfigError(
            f"the last message is a {type(messages[-1]).__name__}; it must be a human message with the question"
        )
    texts: list[str] = []
    documents: list[Document] = []
    for message in messages[last:]:
        text, found = _read(message)
        texts.append(text)
        documents.extend(found)
    return Conversation(
        question="\n\n".join(text for text in texts if text),
        documents=tuple(documents),
        history=tuple(_as_history(message) for message in messages[:last]),
    )


def _as_history(message: BaseMessage) -> dict[str, str]:
    role = next((role for kind, role in _ROLES if isinstance(message, kind)), None)
    if role is None:
        raise ConfigError(f"a {type(message).__name__} cannot be read; use system, human and AI messages")
    text, documents = _read(message)
    return {"role": role, "content": "\n\n".join([*(document.page_content for document in documents), text])}


def _read(message: BaseMessage) -> tuple[str, list[Document]]:
    if isinstance(message.content, str):
        return message.content, []
    texts: list[str] = []
    documents: list[Document] = []
    for block in message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type") == "text":
            texts.append(str(block.get("text", "")))
        elif block.get("type") in ("text-plain", "document"):
            documents.append(_document(block))
        else:
            raise ConfigError(
                f"a content block of type {block.get('type')!r} cannot be read; allowed: text, text-plain, document"
            )
    return "\n".join(texts), documents


def _document(block: Mapping[str, Any]) -> Document:
    body = block.get("document", block)
    fields: Mapping[str, Any] = body if isinstance(body, Mapping) else {"text": body}
    data = fields.get("data") if isinstance(fields.get("data"), Mapping) else None
    source = block.get("source")
    if data is not None:
        fields = {**fields, **data}
    elif isinstance(source, Mapping):
        if source.get("type", "text") != "text":
            raise ConfigError(
                f"a document's source is of type {source['type']!r}; it must be 'text', with the text as data"
            )
        fields = {**fields, "text": source.get("data")}
    text = fields.get("text", fields.get("snippet"))
    if not isinstance(text, str):
        raise ConfigError(f"a document block holds {type(text).__name__} as text; it must be a string under 'text'")
    title = fields.get("title", block.get("title"))
    extras = block.get("extras")
    metadata = dict(extras) if isinstance(extras, Mapping) else {}
    if isinstance(title, str) and title:
        metadata["title"] = title
    identity = block.get("id", fields.get("id"))
    return Document(page_content=text, metadata=metadata, id=None if identity is None else str(identity))
