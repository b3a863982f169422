"""Chat messages in a form that every chat template accepts. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.prompt_template import BLANK_LINE as BLANK_LINE
from rag_posfix.contracts.prompt_template import PromptTemplate as PromptTemplate
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text

ROLES = ("system", "user", "assistant")


def merge_messages(messages: Sequence[ChatMessage], *, with_tools: bool = False) -> tuple[ChatMessage, ...]:
    """Return the messages with at most one system message, at the start, and no role twice in a row.

    Many chat templates raise on anything else. Merged contents are joined by a blank line; all are cleaned. With
    ``with_tools`` there may be results of tools, and calls, which are not merged with other messages.

    Raises:
        ConfigError: a role is unknown, or a content is no string.
    """
    system: list[str] = []
    turns: list[tuple[ChatMessage, list[str]]] = []  # contents are joined at the end: in linear time
    for index, message in enumerate(messages):
        role, content = _check_message(message, index, (*ROLES, "tool") if with_tools else ROLES)
        is_of_tools = with_tools and (role == "tool" or "tool_calls" in message)
        if role == "system":
            system.append(content)
        elif is_of_tools:
            turns.append((message, [content]))
        elif turns and turns[-1][0]["role"] == role and "tool_calls" not in turns[-1][0]:
            turns[-1][1].append(content)
        else:
            turns.append(({"role": role}, [content]))
    if system:
        turns.insert(0, ({"role": "system"}, system))
    return tuple({**message, "content": BLANK_LINE.join(contents)} for message, contents in turns)


def _check_message(message: ChatMessage, index: int, roles: Sequence[str]) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    if role is None or role not in roles:
        raise ConfigError(f"message {index}: role {role!r} is not supported; use one of {', '.join(roles)}")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise ConfigError(f"message {index} ({role}): content is {kind}, must be a string; join its text parts")
    return role, clean_text(content)
