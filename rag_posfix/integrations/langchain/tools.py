"""Tools of a langchain chat model: definitions, which of them must be called, and messages of calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolCall, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.utils.function_calling import convert_to_openai_tool

from rag_posfix.contracts.generator import Generator, ToolEncoder, check_json_schema, shown_model
from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.model.tool_format import ToolCallReader, ToolFormat, find_tool_format


@dataclass(frozen=True, slots=True)
class BoundTools:
    """The tools of a call of the chat model, for one generator.

    Attributes:
        encoder: The generator's tokenizer, which renders the tools.
        form: How its chat template writes calls.
        names: The tools that may be called.
        schema: The JSON schema of a call that must be made; None where the model decides.
    """

    encoder: ToolEncoder
    form: ToolFormat
    names: tuple[str, ...]
    schema: str | None

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self.form, self.names, inside=self.schema is not None)


def openai_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form.

    Raises:
        ConfigError: there are none, one is no tool, or two have the same name.
    """
    try:
        converted = [convert_to_openai_tool(tool) for tool in tools]
        names = [tool["function"]["name"] for tool in converted]
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"a tool cannot be read: {error}; give a tool, a function or a Pydantic class") from error
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"tools={names} must be one tool or more with different names")
    return converted


def resolve_tools(generator: Generator, tools: Sequence[Mapping[str, Any]], choice: Any) -> BoundTools:
    """Return tools as a generator's chat template writes them.

    Args:
        tools: The tools in OpenAI's form.
        choice: ``auto`` or None, ``none``, ``any`` (``required``, True), the name of a tool, or OpenAI's object of it.

    Raises:
        ConfigError: no tool has the name.
        UnsupportedModelError: the chat template takes no tools, or a required call cannot be enforced.
    """
    encoder = generator.encoder
    if not isinstance(encoder, ToolEncoder):
        raise UnsupportedModelError(
            f"{shown_model(generator.model_id)} takes no tools here; give PosfixRAG.as_tool() to a model that does"
        )
    form = find_tool_format(encoder)
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name")
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in (None, "auto", False):
        return BoundTools(encoder.with_tools(tools), form, names, None)
    if choice == "none":
        return BoundTools(encoder.with_tools(()), form, (), None)
    callable_names = names if choice in ("any", "required", True) else (choice,)
    required = [tool for tool in tools if tool["function"]["name"] in callable_names]
    if not required:
        raise ConfigError(f"tool_choice={choice!r} must be auto, none, any or the name of a tool: {', '.join(names)}")
    schema = form.schema(required)
    check_json_schema(generator, schema)
    return BoundTools(encoder.with_tools(tools, form.opening), form, callable_names, schema)


def tool_calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    """Return calls as langchain has them, each with a new id of nine letters and digits, which Mistral's have."""
    return [tool_call(name=name, args=args, id=uuid.uuid4().hex[:9]) for name, args in calls]


def tool_fields(message: BaseMessage) -> dict[str, str]:
    """Return the fields of a chat message that say what a message calls, or which call it answers."""
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["args"], ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
        return {"tool_calls": json.dumps(calls)}
    if isinstance(message, ToolMessage):
        return {"tool_call_id": message.tool_call_id, "name": message.name or ""}
    return {}
