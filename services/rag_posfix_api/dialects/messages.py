"""Messages of text, as OpenAI's and Cohere's chat have them: a role, and a string or a list of parts."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, Tag

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.documents import Forms
from rag_posfix_api.dialects.ranges import needs
from rag_posfix_api.dialects.strict import RequestModel
from rag_posfix_api.http.errors import UnsupportedFeatureError

__all__ = ["EXAMPLE", "Message", "Part", "chat_message"]

EXAMPLE = [{"role": "user", "content": "When was Torvane lit?"}]
"""Messages of a request, for the document of the API: its rule on the last message is no rule of a schema."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Part(RequestModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(extra="allow", json_schema_extra=needs("text", {"type": "string"}))

    type: str = Field(default="text", json_schema_extra={"enum": ["text"]})
    text: str | None = None


class Message(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant"]})
    content: (
        Annotated[
            Annotated[str, Tag("string")] | Annotated[list[Part], Field(fail_fast=True), Tag("array")],
            Forms("string", "array"),
        ]
        | None
    ) = None


def chat_message(message: Message, index: int, param: str = "messages") -> ChatMessage:
    """Return a message for the pipeline.

    Args:
        message: The message.
        index: Its index in the request, for errors.
        param: The field of the messages in this dialect.

    Raises:
        UnsupportedFeatureError: it has another role, or a part that is no text.
    """
    role = _ROLES.get(message.role)
    if role is None:
        raise UnsupportedFeatureError(
            f"{param}[{index}]: role {shown(message.role)} is not supported; use one of {', '.join(_ROLES)}",
            param=param,
        )
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    parts = message.content or []
    for part in parts:
        if part.type != "text" or part.text is None:
            raise UnsupportedFeatureError(
                f"{param}[{index}]: a part of type {shown(part.type)} is not supported; use "
                '{"type": "text", "text": ...}',
                param=param,
            )
    return {"role": role, "content": "\n".join(part.text or "" for part in parts)}
