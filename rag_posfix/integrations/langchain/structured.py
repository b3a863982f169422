"""Typed answers and tools of langchain: schemas, their parsers, and a pipeline as a tool."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from pydantic import BaseModel, Field

from rag_posfix.errors import ConfigError

Model = Runnable[Any, Any]


class ToolInput(BaseModel):
    """What an agent gives the tool of a pipeline."""

    question: str = Field(min_length=1, description="The question, complete in itself.")
    filter: dict[str, Any] | None = Field(
        default=None, description='Only passages whose metadata matches, for example {"year": {"$gte": 1999}}.'
    )


def read_schema(schema: Any) -> tuple[str, BaseOutputParser[Any]]:
    """Return the text of a JSON schema and the parser of its answers.

    Args:
        schema: A Pydantic class, a ``TypedDict``, a function, or a JSON schema.

    Raises:
        ConfigError: it is none of them.
    """
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return json.dumps(schema.model_json_schema()), PydanticOutputParser(pydantic_object=schema)
    is_json_schema = isinstance(schema, dict) and not schema.keys().isdisjoint(("type", "$ref", "anyOf", "properties"))
    try:
        converted = schema if is_json_schema else convert_to_json_schema(schema)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the schema is {type(schema).__name__}; give a Pydantic class, a TypedDict or a JSON schema"
        ) from error
    return json.dumps(converted), JsonOutputParser()


def typed_answers(model: Model, parser: BaseOutputParser[Any], *, include_raw: bool) -> Model:
    """Return a model whose answers are parsed; with ``include_raw`` next to the message and the parser's error."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
