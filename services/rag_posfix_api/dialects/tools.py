"""Tools of requests, which may be called, and the messages of calls and of their results, for all API formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Tag

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.tools import ToolCall, ToolUse
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown
from rag_posfix_api.dialects.answering import reject_fields
from rag_posfix_api.dialects.requests import Forms, Message, RequestModel, chat_message
from rag_posfix_api.http.errors import InvalidRequestError, UnsupportedFeatureError


class FunctionInput(RequestModel):
    """A function that may be called. ``strict`` changes nothing: every call that must be made follows the schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema of type object.")


class ToolInput(RequestModel):
    """A tool in OpenAI's form; functions are supported."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"required": ["function"]})

    type: str = Field(default="function", json_schema_extra={"enum": ["function"]})
    function: FunctionInput | None = None


class NamedTool(RequestModel):
    """The tool that must be called: ``name``, or the function's ``name``."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(default="function", json_schema_extra={"enum": ["function"]})
    name: str | None = None
    function: dict[str, Any] | None = None


ToolChoice = Annotated[
    Annotated[str, Tag("string"), Field(json_schema_extra={"enum": ["none", "auto", "required"]})]
    | Annotated[NamedTool, Tag("object")],
    Forms("string", "object"),
]
"""``none``, ``auto``, ``required``, or the tool that must be called."""


class CalledFunction(BaseModel):
    """A function that the model calls, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallOutput(BaseModel):
    """A call that the model wrote."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def tool_call_output(call: ToolCall) -> ToolCallOutput:
    """Return a call in OpenAI's form."""
    return ToolCallOutput(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments_text))


def definition(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the definition of a tool for a chat template, which needs all of its fields."""
    schema = {"type": "object", "properties": {}} | dict(parameters or {})
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def definitions(tools: Sequence[ToolInput] | None) -> list[dict[str, Any]]:
    """Return the definitions of tools in OpenAI's form; raise for one that is no function."""
    result = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function" or tool.function is None:
            raise unsupported_tool(f"tools[{index}]", tool.type)
        result.append(definition(tool.function.name, tool.function.description, tool.function.parameters))
    return result


def unsupported_tool(field: str, kind: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{field}: a tool of type {shown(kind)} is not supported; use functions with a name and parameters",
        param="tools",
    )


def choice_name(choice: str | NamedTool | None) -> str:
    """Return ``auto``, ``none``, ``required``, or the name of a tool."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    name = choice.name or (choice.function or {}).get("name")
    if choice.type != "function" or not isinstance(name, str):
        raise UnsupportedFeatureError(
            f"a tool_choice of type {shown(choice.type)} is not supported; use none, auto, required, or a function "
            "with its name",
            param="tool_choice",
        )
    return name


def tool_use(
    define: Callable[[], Sequence[Mapping[str, Any]]], choice: str, *, parallel: bool | None = None
) -> ToolUse | None:
    """Return the tools that may be called; None where there are none, or the choice is ``none``.

    Args:
        define: Returns the definitions; not called for the choice ``none``: tools that nobody may call are read over.

    Raises:
        InvalidRequestError: as ``ToolUse``.
    """
    tools = define() if choice != "none" else ()
    if choice == "none" or (choice == "auto" and not tools):
        return None
    try:
        return ToolUse(tools, choice, parallel=parallel is not False)
    except ConfigError as error:
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise InvalidRequestError(str(error), param=param) from error


def check_free_answer(tools: ToolUse | None, fields: Mapping[str, bool]) -> None:
    """Raise for fields of a request, by their names, that cannot be honoured where the answer may be a call.

    Args:
        fields: Whether each of them is given.
    """
    for name, is_given in fields.items():
        if tools is not None and is_given and (tools.choice == "auto" or name == "logprobs"):
            raise UnsupportedFeatureError(
                f"{name} is not supported next to tools that may be called; leave one of them out, or set tool_choice "
                "to 'none'",
                param=name,
            )


class ToolTurns:
    """The calls and results of one conversation, in its order."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls
        self._open: list[str] = []

    def called(self, text: str, calls: Sequence[tuple[str | None, str, Any]], field: str) -> ChatMessage:
        """Return an answer with calls.

        Args:
            calls: Their id (None for the next number), the name of the tool, and its arguments: an object or its JSON.
            field: The message, for errors.
        """
        written = []
        for identity, name, arguments in calls:
            identity = identity or f"{len(self._names):09d}"
            self._names[identity] = name
            self._open.append(identity)
            function = {"name": name, "arguments": _arguments_text(arguments, field)}
            written.append({"id": identity, "type": "function", "function": function})
        return {"role": "assistant", "content": text, "tool_calls": json.dumps(written)}

    def result(self, text: str, identity: str | None, field: str) -> ChatMessage:
        """Return the result of a call; without an id, of the first call that has none yet."""
        if identity is None and self._open:
            identity = self._open[0]
        if identity is None or identity not in self._names:
            raise InvalidRequestError(
                f"{field}: {shown(identity)} is the id of no call before it; send the message with the call, too",
                param=field.partition("[")[0],
            )
        if identity in self._open:
            self._open.remove(identity)
        return {"role": "tool", "content": text, "tool_call_id": identity, "name": self._names[identity]}


def _arguments_text(arguments: Any, field: str) -> str:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(
            f"{field}: the arguments of a call must be a JSON object", param=field.partition("[")[0]
        )
    return json.dumps(parsed, ensure_ascii=False)


def conversation(messages: Sequence[Message], param: str = "messages") -> list[ChatMessage]:
    """Return messages for the pipeline; those of the role ``tool``, and ``tool_calls``, are in OpenAI's form."""
    turns, result = ToolTurns(), []
    for index, message in enumerate(messages):
        field = f"{param}[{index}]"
        reject_fields(message.model_extra, {"function_call": (None,)}, f"{field}.")
        if message.role == "tool":
            text = chat_message(message.model_copy(update={"role": "user"}), index, param)["content"]
            result.append(turns.result(text, message.tool_call_id, field))
        elif message.role == "assistant" and message.tool_calls:
            text = chat_message(message.model_copy(update={"tool_calls": None}), index, param)["content"]
            calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
            result.append(turns.called(text, calls, field))
        else:
            result.append(chat_message(message, index, param))
    return result
