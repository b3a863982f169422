"""Bodies of requests: JSON types, documents, messages of text, and what this service adds to each API format.

A value of another JSON type is rejected, not converted, as the schema says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from langchain_core.documents import Document
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Strict,
    Tag,
    WithJsonSchema,
    model_validator,
)

from rag_posfix.assembly.templates import read_template, shipped_templates
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.method_spec import read_arrangement
from rag_posfix.contracts.request import MitigationChoice, PromptTemplate
from rag_posfix.parameters import shown
from rag_posfix_api.collections.store import NAME_PATTERN
from rag_posfix_api.http.errors import RequestError

MAX_STOPS = 16  # OpenAI allows 4; clients of other servers send more
MAX_STOP_CHARACTERS = 256

VISIBLE: Final = {"pattern": r"\S"}
"""A text with at least one visible character, for ``json_schema_extra``."""


def within(**limits: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds limits to the schema of an optional number, for ``json_schema_extra``."""

    def add(schema: dict[str, Any]) -> None:
        for member in schema["anyOf"]:
            if member["type"] != "null":
                member |= limits

    return add


def needs(name: str, value: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that makes a field of an object required, for ``json_schema_extra`` of a model.

    The model itself need not require it: the parser then names the error.
    """

    def add(schema: dict[str, Any]) -> None:
        schema["properties"][name] = value
        schema["required"] = sorted({*schema.get("required", ()), name})

    return add


def _form(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, list | tuple):
        return "array"
    return "object" if isinstance(value, dict | BaseModel) else "other"


def Forms(*allowed: str) -> Discriminator:  # reads as an annotation, as Field and Discriminator do
    """Choose the member of a union by the JSON type of the value, so that errors name one member only.

    Its tags are of ``string``, ``array`` and ``object``.
    """
    return Discriminator(
        _form,
        custom_error_type="form",
        custom_error_message=f"input should be of type {' or '.join(allowed)}",
    )


T = TypeVar("T")

TextOr = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[T], Field(fail_fast=True), Tag("array")], Forms("string", "array")
]
"""A text, or a list of parts."""


class RequestModel(BaseModel):
    """A part of a request. ``"1"`` is no number, and ``1`` is no truth value."""

    model_config = ConfigDict(strict=True)


def _drop_point(value: Any) -> Any:
    """Return 226.0 as 226: JSON has one kind of number, and some clients write all of them with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_64_bits(seed: int) -> int:
    return seed if -(2**63) <= seed < 2**63 else seed % 2**63


WHOLE = BeforeValidator(_drop_point)
"""Takes whole numbers with a decimal point; must follow the bounds, or the schema loses them."""

Integer = Annotated[int, BeforeValidator(_drop_point)]
"""A whole number, with or without a decimal point."""

Natural = Annotated[int, Field(ge=0), BeforeValidator(_drop_point)]
"""A whole number from 0 on."""

Count = Annotated[int, Field(ge=1), BeforeValidator(_drop_point)]
"""A whole number from 1 on."""

Passages = Annotated[int, Field(ge=1, le=1000), BeforeValidator(_drop_point)]
"""A number of passages to retrieve."""

Seed = Annotated[int, BeforeValidator(_drop_point), AfterValidator(_in_64_bits)]
"""A seed; those of more than 64 bits are reduced."""

# Ranges that the pipeline checks, with status 400: `json_schema_extra` documents them without a check.
MaxTokens = Annotated[Integer | None, Field(json_schema_extra=within(minimum=1))]
Temperature = Annotated[FiniteFloat | None, Field(json_schema_extra=within(minimum=0, maximum=5))]
TopP = Annotated[FiniteFloat | None, Field(json_schema_extra=within(minimum=0, maximum=1))]
TopK = Annotated[Integer | None, Field(json_schema_extra=within(minimum=0))]

_STOP = {"type": "string", "maxLength": MAX_STOP_CHARACTERS}
_STOPS = {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}

StopList = Annotated[list[str], Field(fail_fast=True), WithJsonSchema(_STOPS)]
"""Stop strings; ``stop_strings`` checks their limits, with status 400."""

StopStrings = Annotated[
    Annotated[str, Tag("string"), WithJsonSchema(_STOP)] | Annotated[StopList, Tag("array")], Forms("string", "array")
]
"""A stop string, or several."""

Words = Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})]
"""A text; numbers are taken as they are written."""


def _with_text(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"type": ["string", "number"]}}}


_HAS_TEXT: dict[str, Any] = {"anyOf": [_with_text("text"), _with_text("snippet")]}


class DocumentData(BaseModel):
    """The content of a document in Cohere's format. Other fields come back with citations."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)

    title: Words | None = None
    text: Words | None = None
    snippet: Words | None = None


class DocumentObject(BaseModel):
    """A document: text, or Cohere's ``data``, with optional id, title, score and metadata."""

    model_config = ConfigDict(
        extra="ignore",
        coerce_numbers_to_str=True,
        json_schema_extra={
            "anyOf": [
                _with_text("text"),
                {"required": ["data"], "properties": {"data": {"type": "object", **_HAS_TEXT}}},
            ]
        },
    )

    id: Words | None = None
    title: Words | None = None
    text: Words | None = None
    data: DocumentData | None = None
    score: Annotated[FiniteFloat, Strict()] | None = None
    relevance_score: Annotated[FiniteFloat, Strict()] | None = None

    @model_validator(mode="after")
    def _has_text(self) -> DocumentObject:
        if self.content is None:
            raise ValueError("a document needs its text in 'text', 'data.text' or 'data.snippet'")
        return self

    @property
    def content(self) -> str | None:
        """The text, from any of its fields."""
        if self.text is not None or self.data is None:
            return self.text
        return self.data.snippet if self.data.text is None else self.data.text

    @property
    def heading(self) -> str | None:
        """The title, from any of its fields."""
        return self.title if self.title is not None or self.data is None else self.data.title

    @property
    def relevance(self) -> float | None:
        """The score, from any of its fields."""
        return self.score if self.relevance_score is None else self.relevance_score


DocumentInput = Annotated[
    Annotated[str, Tag("string")] | Annotated[DocumentObject, Tag("object")], Forms("string", "object")
]
"""A document as clients send it."""


def document_text(document: str | DocumentObject) -> str:
    """Return the text of a document of any form."""
    return document if isinstance(document, str) else document.content or ""


Documents = Annotated[list[DocumentInput], Field(fail_fast=True)]
GivenDocuments = Annotated[
    Documents | None,
    Field(
        description="The passages to answer from. Without the field they are retrieved, where an index is served; an "
        "empty list answers without passages."
    ),
]


def to_documents(inputs: Sequence[str | DocumentObject], max_documents: int) -> list[Document]:
    """Return the documents of a request. Without an id, each gets ``doc_INDEX``, with ``_`` until it is unique."""
    check_count(len(inputs), max_documents)
    taken = {document.id for document in inputs if isinstance(document, DocumentObject)}
    documents = []
    for index, document in enumerate(inputs):
        free_id = f"doc_{index}"
        while free_id in taken:
            free_id += "_"
        documents.append(_document(document, free_id))
    return documents


def check_count(count: int, max_documents: int, param: str = "documents") -> None:
    """Raise for too many documents; ``param`` is their field."""
    if count > max_documents:
        raise RequestError(
            f"{param} has {count} entries, at most {max_documents} are allowed; send the best ones",
            param=param,
            code="too_many_documents",
        )


def _document(document: str | DocumentObject, free_id: str) -> Document:
    if isinstance(document, str):
        return Document(page_content=document, id=free_id)
    metadata = {"title": document.heading, "relevance_score": document.relevance}
    return Document(
        page_content=document.content or "",
        metadata={name: value for name, value in metadata.items() if value is not None},
        id=document.id or free_id,
    )


EXAMPLE = [{"role": "user", "content": "When was Torvane lit?"}]
"""Messages of a request, for the document of the API: its rule on the last message is no rule of a schema."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Part(RequestModel):
    """A part of a message; only text is supported."""

    model_config = ConfigDict(extra="allow", json_schema_extra=needs("text", {"type": "string"}))

    type: str = Field(default="text", json_schema_extra={"enum": ["text"]})
    text: str | None = None


class FunctionCallInput(RequestModel):
    """The function of a call, and its arguments: an object, or its JSON text."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: Annotated[
        Annotated[str, Tag("string")] | Annotated[dict[str, Any], Tag("object")], Forms("string", "object")
    ]


class ToolCallInput(RequestModel):
    """A call of a tool in an earlier answer."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    function: FunctionCallInput


class Message(RequestModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]})
    content: TextOr[Part] | None = None
    tool_calls: list[ToolCallInput] | None = Field(default=None, description="Of an answer: the tools it called.")
    tool_call_id: str | None = Field(default=None, description="Of the role 'tool': the call whose result it is.")


Messages = Annotated[
    list[Message],
    Field(
        fail_fast=True,
        min_length=1,
        examples=[EXAMPLE],
        description="The last one must be the user's: it is the question. Results of tools may follow it.",
    ),
]


def chat_message(message: Message, index: int, param: str = "messages") -> ChatMessage:
    """Return a message for the pipeline. Errors name its index and ``param``, the field of the messages.

    Raises:
        RequestError: it has another role, a part that is no text, or calls of tools, for formats without.
    """
    if message.tool_calls:
        raise RequestError(
            f"{param}[{index}]: tool_calls is not supported here; leave it out", param=param, code="unsupported"
        )
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{param}[{index}]: role {shown(message.role)} is not supported; use one of {', '.join(_ROLES)}",
            param=param,
            code="unsupported",
        )
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    content_parts = message.content or []
    for content_part in content_parts:
        if content_part.type != "text" or content_part.text is None:
            raise RequestError(
                f"{param}[{index}]: a part of type {shown(content_part.type)} is not supported; use "
                '{"type": "text", "text": ...}',
                param=param,
                code="unsupported",
            )
    return {"role": role, "content": "\n".join(content_part.text or "" for content_part in content_parts)}


MAX_FIELDS = 16


class MitigationInput(RequestModel):
    """A method and its parameters."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        # Each unknown field would be a separate error.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"{len(value)} fields are given; a mitigation has 'name' and 'parameters'")
        return value


Mitigation = Annotated[
    Annotated[str, Tag("string")] | Annotated[MitigationInput, Tag("object")], Forms("string", "object")
]
"""A method by name, or with its parameters."""


class TemplateInput(RequestModel):
    """The text of a prompt; a field that is left out has its default."""

    model_config = ConfigDict(extra="forbid")

    instruction: str | None = Field(default=None, description="Text before the passages.")
    heading: str | None = Field(default=None, description="Text before a passage with a title; holds {title}.")
    separator: str | None = Field(default=None, description="Text after every passage.")
    question_prefix: str | None = Field(default=None, description="Text before the question.")
    answer_cue: str | None = Field(default=None, description="Text after the question.")
    system: str | None = Field(default=None, description="A system message before all others.")


Template = Annotated[
    Annotated[str, Tag("string")] | Annotated[TemplateInput, Tag("object")], Forms("string", "object")
]
"""A shipped prompt template by name, or the fields of one."""

MinRelevance = Literal["auto", "off"] | Annotated[FiniteFloat, Field(ge=0, le=1)]
MetadataFilter = Annotated[dict[str, Any], Field(examples=[{"year": {"$gte": 1999}, "kind": ["book", "map"]}])]
"""A filter in the language of ``rag_posfix.contracts.retrieval``, which checks it, with status 400."""


class PosfixInput(RequestModel):
    """What this service adds to the API of the dialect, in one object."""

    model_config = ConfigDict(extra="forbid")

    mitigation: Mitigation | None = Field(default=None, description="A method by name, or with its parameters.")
    order: str | None = Field(default=None, min_length=1, description="The order that the passages stand in.")
    k: Passages | None = Field(default=None, description="How many passages to retrieve.")
    index: str | None = Field(
        default=None,
        description="Name of the index to retrieve from (RAG_POSFIX_INDEXES); the default one without it.",
    )
    collection: str | None = Field(
        default=None, description="Retrieve from this collection.", json_schema_extra=within(pattern=NAME_PATTERN)
    )
    arrangement: str | None = Field(
        default=None,
        description="reranker/order/method in one text, for example 'likelihood+embedding/reverse/none', in place of "
        "``mitigation`` and ``order``. An empty reranker is the service's own.",
    )
    allow_ungrounded: bool | None = Field(
        default=None,
        description="Answer from the model's memory if no passage was found, where the operator allows that; false "
        "always has the answer that no passage was found.",
    )
    allow_unsupported: bool | None = Field(
        default=None,
        description="Answer, with a warning, if by the model's judgement, or by the words of its answer, no passage "
        "answers the question; false always has the answer that none does.",
    )
    source_text: bool | None = Field(
        default=None, description="Whether ``documents`` of the response have their text; those of an index have it."
    )
    query: Literal["last", "history", "rewrite"] | None = Field(default=None, description="What is searched for.")
    template: Template | None = Field(
        default=None, description="A shipped prompt template or its fields, where the operator allows it."
    )
    filter: MetadataFilter | None = Field(default=None, description="Retrieve passages whose metadata matches.")
    min_relevance: MinRelevance | None = Field(default=None, description="Which retrieved passages are read.")
    second_step: bool | None = Field(default=None, description="Whether a second search may follow the first.")


Unsupported = Mapping[str, tuple[Any, ...]]


class ModelRequest(RequestModel):
    """A request to the served model. Fields of the API without effect here are ignored.

    Attributes:
        unsupported: Fields that would change the answer and are refused, with the values that leave it unchanged.
    """

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Unsupported] = {}

    model: str | None = Field(default=None, examples=["default"], description="The served model, or 'default'.")
    stream: bool | None = None

    @property
    def served_name(self) -> str:
        """The name of the model that is asked for; "" is the served one."""
        return self.model or ""


class AnswerRequest(ModelRequest):
    """A request for an answer from passages."""

    posfix: PosfixInput | None = Field(default=None, description="What this service adds to the API.")


def chosen_methods(posfix: PosfixInput) -> dict[str, Any]:
    """Return the fields of a ``Question`` that a request chooses; None takes the default.

    Raises:
        RequestError: there is an arrangement and also a mitigation or an order.
        ConfigError: the arrangement cannot be read.
    """
    names = ("order", "k", "index", "query", "filter", "min_relevance", "allow_unsupported", "second_step")
    chosen = {name: getattr(posfix, name) for name in names} | {"mitigation": mitigation_choice(posfix.mitigation)}
    if posfix.arrangement is None:
        return chosen
    repeated = [name for name in ("mitigation", "order") if chosen[name] is not None]
    if repeated:
        raise RequestError(
            f"arrangement names method and order already; leave out {' and '.join(repeated)}",
            param="posfix.arrangement",
        )
    reranker, order, mitigation = read_arrangement(posfix.arrangement)
    return chosen | {"reranker": reranker, "order": order, "mitigation": mitigation}


def prompt_template(
    template: str | TemplateInput | None, allowed: Literal["none", "shipped", "any"]
) -> PromptTemplate | None:
    """Return the prompt template of a request, or None for the default.

    Raises:
        RequestError: the operator does not allow it, or there is none of this name. Clients name no files.
    """
    if template is None:
        return None
    if allowed == "none" or (allowed == "shipped" and not isinstance(template, str)):
        raise RequestError(
            "this service takes no template of this kind with a request; leave it out, or ask its operator to set "
            "RAG_POSFIX_SERVICE_REQUEST_TEMPLATES to 'shipped' (names) or 'any' (also fields)",
            param="posfix.template",
        )
    if isinstance(template, TemplateInput):
        return read_template(template.model_dump(exclude_none=True))
    if template not in shipped_templates():
        raise RequestError(
            f"unknown template {shown(template)}; use one of {', '.join(shipped_templates())}", param="posfix.template"
        )
    return shipped_templates()[template]


def mitigation_choice(mitigation: str | MitigationInput | None) -> MitigationChoice | None:
    """Return the mitigation of a request, or None for the default."""
    if isinstance(mitigation, MitigationInput):
        return MitigationChoice(mitigation.name, mitigation.parameters)
    return None if mitigation is None else MitigationChoice(mitigation)
