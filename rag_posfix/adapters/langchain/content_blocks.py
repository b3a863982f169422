"""Reads inputs of langchain chains: content blocks, messages, text, dicts, questions; writes documents as blocks.

Tools and typed answers of langchain: definitions, calls that must be made, schemas, and a pipeline as a tool.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import uuid
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.tool import tool_call
from langchain_core.output_parsers import BaseCumulativeTransformOutputParser, BaseOutputParser, PydanticOutputParser
from langchain_core.outputs import Generation
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel, BeforeValidator, Field

from rag_posfix.assembly.templates import read_template
from rag_posfix.checked import check_type
from rag_posfix.contracts.answer import Question
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown

__all__ = ["document_block"]


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


_ROLE_OF_CLASS: tuple[tuple[type[BaseMessage], str], ...] = (
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (SystemMessage, "system"),
)


TemplateField: TypeAlias = Annotated[
    Any, BeforeValidator(lambda value: None if value is None else read_template(value))
]
"""A field of a model: a prompt template, read where it is given; None leaves it out."""

RAGInput: TypeAlias = (
    str | dict[str, Any] | Question | PromptValue | BaseMessage | Sequence[BaseMessage | tuple[str, str]]
)
"""The question; or ``{"question", "documents", "history", ...}``, the fields of ``Question``; or messages.

Messages may be pairs of role and text: ``("human", "Who designed it?")``.
"""

_FIELDS = (
    "documents", "history", "mitigation", "order", "seed", "k", "sampling", "tenant", "use_cache", "template", "query",
    "filter",
)  # fmt: skip
_OTHER_NAMES = {"input": "question", "context": "documents", "chat_history": "history"}
_DOCUMENTS = ("text-plain", "document")
_HOW = (
    'give the question as text, as {"question": text, "documents": [...]}, as messages, or as a Question; a retriever '
    'is joined by {"context": retriever, "question": RunnablePassthrough()} | rag, or PosfixRAG(retriever=retriever)'
)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """The text of the last human messages, the documents in these, and the messages before and behind them."""

    question: str
    documents: tuple[Document, ...]
    history: tuple[Mapping[str, str], ...]
    tool_turns: tuple[Mapping[str, str], ...] = ()


def document_block(document: Document) -> dict[str, Any]:
    """Return ``document`` as a standard ``text-plain`` content block, its metadata (score included) in ``extras``."""
    check_type("document", document, Document, "a langchain_core Document")
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


def read_conversation(messages: Sequence[BaseMessage], *, with_tools: bool = False) -> Conversation:
    """Return question, documents and history of a list of messages.

    A human message may contain text and documents, as blocks of three kinds: langchain's ``text-plain``, Cohere's
    ``{"type": "document", "document": {"data": {"text": ...}}}`` and Anthropic's ``{"type": "document", "source":
    {"type": "text", "data": ...}}``. Documents in earlier messages become part of the history's text. With
    ``with_tools`` calls of tools and their results may follow the human message.

    Raises:
        ConfigError: there is no message, the last one is not human, or a block is malformed.
    """
    if not messages:
        raise ConfigError("there are 0 messages; the last one must be a human message with the question")
    end = len(messages)
    if with_tools and isinstance(messages[-1], ToolMessage):
        while end > 0 and not isinstance(messages[end - 1], HumanMessage):
            end -= 1
    tool_turns, messages = messages[end:], messages[:end] or messages
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
        text, blocks = _read(message)
        texts.append(text)
        documents.extend(blocks)
    return Conversation(
        question="\n\n".join(text for text in texts if text),
        documents=tuple(documents),
        history=tuple(_as_history(message, with_tools) for message in messages[:last]),
        tool_turns=tuple(_as_history(message, with_tools) for message in tool_turns),
    )


def _as_history(message: BaseMessage, with_tools: bool) -> dict[str, str]:
    role = _role_of(message)
    if with_tools and isinstance(message, ToolMessage):
        role = "tool"
    if role is None:
        raise ConfigError(f"a {type(message).__name__} cannot be read; use system, human and AI messages")
    text, documents = _read(message)
    content = "\n\n".join([*(document.page_content for document in documents), text])
    return {"role": role, "content": content, **(tool_fields(message) if with_tools else {})}


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
        elif block.get("type") in _DOCUMENTS:
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


def question_fields(value: RAGInput) -> dict[str, Any]:
    """Return the fields of a question in the input of a chain: ``text`` and the fields of ``Question`` that are set.

    A dict may use the names of langchain's chains: ``input`` for the question, ``context`` for the documents,
    ``chat_history`` for the history. Documents may be ``Document`` objects or texts; one text is one passage.

    Raises:
        ConfigError: there is no question, or a field is unknown, given twice, or of a wrong type.
    """
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Question):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    messages = _messages(value)
    if messages is not None:
        conversation = read_conversation(messages)
        documents = {"documents": list(conversation.documents)} if conversation.documents else {}
        return {"text": conversation.question, "history": list(conversation.history), **documents}
    if not isinstance(value, dict):
        raise ConfigError(f"PosfixRAG was asked with {_input_kind(value)}; {_HOW}")
    return _from_dict(_renamed(value))


def joined_input(chunks: Sequence[RAGInput]) -> RAGInput:
    """Return the sum of the chunks of a streamed input."""
    if not chunks:
        raise ConfigError("PosfixRAG was asked nothing; give a question")
    total: Any = functools.reduce(operator.add, chunks)
    joined: RAGInput = total
    return joined


def _from_dict(value: Mapping[str, Any]) -> dict[str, Any]:
    question = value.get("question")
    if isinstance(question, BaseMessage):
        question, blocks = _read(question)
        value = {**value, "documents": [*blocks, *_as_documents(value.get("documents") or [])]} if blocks else value
    if not isinstance(question, str):
        raise ConfigError(f"PosfixRAG was asked with {_input_kind(value)}; {_HOW}")
    unknown = sorted(set(value) - {"question", *_FIELDS})
    if unknown:
        aliases = ", ".join(f"{other} for {name}" for other, name in _OTHER_NAMES.items())
        raise ConfigError(
            f"PosfixRAG was asked with {unknown[0]!r}; a question may hold question, {', '.join(_FIELDS)} ({aliases})"
        )
    fields = {name: value[name] for name in _FIELDS if name in value}
    if fields.get("template") is not None:
        fields["template"] = read_template(fields["template"])
    if fields.get("documents") is not None:
        fields["documents"] = _as_documents(fields["documents"])
    if "history" in fields:
        fields["history"] = [_history_message(message) for message in fields["history"] or ()]
    return {"text": question, **fields}


def _renamed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict under our names; the names of langchain's chains are other names of the same fields."""
    renamed: dict[str, Any] = {}
    for name, value in fields.items():
        field = _OTHER_NAMES.get(name, name)
        if field in renamed:
            raise ConfigError(f"PosfixRAG was asked with {field!r} under two names; leave out {name!r} or the other")
        renamed[field] = value
    return renamed


def _as_documents(value: Any) -> list[Any]:
    """Return documents; a text is one document. Assembly says which entry is neither."""
    if isinstance(value, str):
        value = [value] if value.strip() else []
    if not isinstance(value, Sequence):
        raise ConfigError(f"documents is {type(value).__name__}; give a list of Documents or texts")
    return [Document(page_content=entry) if isinstance(entry, str) else entry for entry in value]


def _messages(value: object) -> Sequence[BaseMessage] | None:
    """Return the messages if ``value`` is a message, a list of them or a formatted chat prompt."""
    if isinstance(value, PromptValue):
        return value.to_messages()
    if isinstance(value, BaseMessage):
        return [value]
    if isinstance(value, list | tuple) and value and all(map(_is_message, value)):
        return [_as_message(entry) for entry in value]
    return None


def _is_message(value: object) -> bool:
    """Return whether ``value`` is a message, or a pair of role and content."""
    return isinstance(value, BaseMessage) or (
        isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )


def _as_message(value: Any) -> BaseMessage:
    if isinstance(value, BaseMessage):
        return value
    try:
        return convert_to_messages([tuple(value)])[0]
    except ValueError as error:
        raise ConfigError(
            f"a message has the role {shown(value[0])}; a pair of role and text has the role human, ai, or system"
        ) from error


def _history_message(message: Any) -> Any:
    """Return a langchain message, or a pair of role and content, as ``{"role", "content"}``; other objects as is."""
    if not _is_message(message):
        return message
    message = _as_message(message)
    blocks = [block for block in message.content if isinstance(block, Mapping) and block.get("type") in _DOCUMENTS]
    content = "\n\n".join([*(_document(block).page_content for block in blocks), message.text])
    return {"role": _role_of(message) or message.type, "content": content}


def _role_of(message: BaseMessage) -> str | None:
    """Return the role by class: the type of the chunk of a stream is another."""
    return next((role for kind, role in _ROLE_OF_CLASS if isinstance(message, kind)), None)


def _input_kind(value: object) -> str:
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, value)) or 'nothing'} without a question"
    if isinstance(value, list) and value and all(isinstance(entry, Document) for entry in value):
        return f"{len(value)} documents and no question"
    return type(value).__name__
