"""Tools and typed answers of langchain: definitions, calls that must be made, schemas, and a pipeline as a tool."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, ToolCall, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.output_parsers import (
    BaseCumulativeTransformOutputParser,
    BaseOutputParser,
    PydanticOutputParser,
)
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel, Field

from rag_posfix.errors import ConfigError

Model = Runnable[Any, Any]


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


class ToolInput(BaseModel):
    """What an agent gives the tool of a pipeline."""

    question: str = Field(min_length=1, description="The question, complete in itself.")
    filter: dict[str, Any] | None = Field(
        default=None, description='Only passages whose metadata matches, for example {"year": {"$gte": 1999}}.'
    )


class CompleteJson(BaseCumulativeTransformOutputParser[Any]):
    """Parses whole answers; langchain's parser closes JSON that was cut, and gives values that nobody wrote."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            return _check_complete(result[0].text)
        try:
            return parse_partial_json(result[0].text)
        except ValueError:
            return None

    def parse(self, text: str) -> Any:
        return _check_complete(text)


class CompleteModel(PydanticOutputParser[BaseModel]):
    """As ``CompleteJson``, for a Pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            _check_complete(result[0].text)
        return super().parse_result(result, partial=partial)


def _check_complete(text: str) -> Any:
    """Return the value of a JSON text, which must be complete."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise OutputParserException(
            f"the answer is no complete JSON ({error}); raise max_tokens, or check that a passage was found",
            llm_output=text,
        ) from error


def tool_argument_errors(error: Any) -> str:
    """Return what is wrong with the arguments of a call, for the model that wrote them."""
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


def read_schema(schema: Any) -> tuple[str, BaseOutputParser[Any]]:
    """Return the text of a JSON schema and the parser of its answers.

    Args:
        schema: A Pydantic class, a ``TypedDict``, a function, or a JSON schema.

    Raises:
        ConfigError: it is none of them.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return json.dumps(schema.model_json_schema()), CompleteModel(pydantic_object=schema)
    is_json_schema = isinstance(schema, dict) and not schema.keys().isdisjoint(("type", "$ref", "anyOf", "properties"))
    try:
        converted = schema if is_json_schema else convert_to_json_schema(schema)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the schema is {type(schema).__name__}; give a Pydantic class, a TypedDict or a JSON schema"
        ) from error
    return json.dumps(converted), CompleteJson()


def typed_answers(model: Model, parser: BaseOutputParser[Any], *, include_raw: bool) -> Model:
    """Return a model whose answers are parsed; with ``include_raw`` next to the message and the parser's error."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    # The model is first: a RunnableMap passes no arguments on, such as documents.
    raw = model | RunnableMap(raw=RunnablePassthrough())
    return raw | parsed.with_fallbacks([failed], exception_key="parsing_error")
