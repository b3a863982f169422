"""Tools for chat templates that have none: as text of ordinary messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rag_posfix.contracts.generator import ChatMessage

_INSTRUCTION = (
    'You may call these functions. To call one, answer with nothing but {"name": its name, "arguments": an object}.'
)


def chat_with_written_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the messages as a template without tools takes them.

    The tools are in the system message, a call is JSON in the assistant's message, and a result is a message of the
    user. Neighbours of one role are joined.
    """
    written: list[tuple[str, list[str]]] = []
    if tools:
        listed = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        written.append(("system", ["\n".join((_INSTRUCTION, *listed))]))
    for message in messages:
        role, contents = message["role"], [message["content"]]
        if "tool_calls" in message:
            contents = [text for text in contents if text]
            for call in json.loads(message["tool_calls"]):
                function = call["function"]
                contents.append(f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}')
        elif role == "tool":
            role, contents = "user", [f"{message['name']} returned: {message['content']}"]
        if written and written[-1][0] == role:
            written[-1][1].extend(contents)
        else:
            written.append((role, contents))
    return [{"role": role, "content": "\n\n".join(contents)} for role, contents in written]
