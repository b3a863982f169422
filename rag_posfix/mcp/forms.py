"""What the tools take and give, as pydantic models, which write the JSON schemas; and the addresses of passages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rag_posfix.contracts.answer import Answer, AnswerDocument
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown
from rag_posfix.text import clean_text

MAX_PASSAGES = 100
_SCHEME = "rag-posfix://"

_FILTER = (
    "Only passages whose metadata matches: a value, a list of allowed values, or conditions $eq, $ne, $in, $nin, $gt, "
    '$gte, $lt, $lte, $exists of a field; $and, $or, $not combine. Example: {"year": {"$gte": 1999}, "kind": ["book"]}'
)


class Place(BaseModel):
    """Where passages are searched: the index or collection that the server has by this name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    k: int | None = Field(
        default=None, ge=1, le=MAX_PASSAGES, description="Number of passages to retrieve; the server's own without it."
    )
    filter: dict[str, Any] | None = Field(default=None, description=_FILTER)
    index: str | None = Field(default=None, description="Name of the index to search; the default one without it.")
    collection: str | None = Field(default=None, description="Name of the collection to search, in place of an index.")


class SearchInput(Place):
    """Arguments of ``search``."""

    query: str = Field(min_length=1, description="What the passages are about, complete in itself.")


class AskInput(Place):
    """Arguments of ``ask``."""

    question: str = Field(min_length=1, description="The question, complete in itself.")


class PassageOutput(BaseModel):
    """A passage with its source."""

    id: str
    title: str | None = None
    source: str | None = Field(default=None, description="Its file.")
    page: int | None = Field(default=None, description="The page of its file on which it begins.")
    score: float | None = Field(default=None, description="Its relevance, 0 to 1.")
    text: str | None = Field(default=None, description="Its text; null where the server does not give it.")
    uri: str = Field(description="The resource with the text of the passage.")


class FoundPassage(PassageOutput):
    """A passage that a search found."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="Its other fields, which filters compare.")


class SearchOutput(BaseModel):
    """The passages, best first."""

    passages: list[FoundPassage]


class CitationOutput(BaseModel):
    """A sentence of the answer and the passages that it is from."""

    text: str
    passages: list[str] = Field(description="Ids of passages.")
    pages: list[int | None] = Field(description="The page of each passage on which the sentence is; null without one.")


class AskOutput(BaseModel):
    """An answer with its sources."""

    answer: str
    grounded: bool = Field(description="Whether the model read a passage; false if none was found.")
    sources: list[PassageOutput] = Field(description="The passages that the model read.")
    citations: list[CitationOutput]
    warnings: list[str]


def schema_of(model: type[BaseModel], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON schema of arguments or results, without fields that a server does not take."""
    schema = model.model_json_schema()
    properties = schema["properties"]
    return {**schema, "properties": {name: field for name, field in properties.items() if name not in leave_out}}


def read_arguments(model: type[Place], arguments: Mapping[str, Any], leave_out: tuple[str, ...]) -> Any:
    """Return the arguments of a call.

    Raises:
        ConfigError: an argument is missing, unknown or wrong; the message names each.
    """
    unknown = [name for name in leave_out if arguments.get(name) is not None]
    if unknown:
        raise ConfigError(f"{unknown[0]}={shown(arguments[unknown[0]])}: this server has none; leave it out")
    try:
        return model.model_validate(_cleaned(dict(arguments)))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_input=False)]
        names = ", ".join(name for name in model.model_fields if name not in leave_out)
        raise ConfigError(f"{'; '.join(problems)}; the arguments are {names}") from error


def _cleaned(value: Any) -> Any:
    """Return a JSON value whose texts are valid Unicode."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_cleaned(entry) for entry in value]
    return {clean_text(key): _cleaned(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def passage_uri(place: Place, passage_id: str) -> str:
    """Return the address of a passage: of the default index, a named one, or a collection."""
    if place.collection is not None:
        return f"{_SCHEME}collections/{quote(place.collection, safe='')}/{quote(passage_id, safe='')}"
    if place.index is not None:
        return f"{_SCHEME}indexes/{quote(place.index, safe='')}/{quote(passage_id, safe='')}"
    return f"{_SCHEME}passages/{quote(passage_id, safe='')}"


URI_TEMPLATES = {
    f"{_SCHEME}passages/{{id}}": "A passage of the index.",
    f"{_SCHEME}indexes/{{index}}/{{id}}": "A passage of a further index.",
    f"{_SCHEME}collections/{{collection}}/{{id}}": "A passage of a collection.",
}
"""The addresses of passages, with the meaning of each."""


def read_uri(uri: str) -> tuple[Place, str]:
    """Return where a passage is and its id, from its address.

    Raises:
        ConfigError: it is not the address of a passage.
    """
    kind, *names = map(unquote, uri.removeprefix(_SCHEME).split("/"))
    if uri.startswith(_SCHEME) and all(names):
        if kind == "passages" and len(names) == 1:
            return Place(), names[0]
        if kind == "indexes" and len(names) == 2:
            return Place(index=names[0]), names[1]
        if kind == "collections" and len(names) == 2:
            return Place(collection=names[0]), names[1]
    raise ConfigError(f"uri={shown(uri)} is not the address of a passage; use one of {', '.join(URI_TEMPLATES)}")


def found_passage(document: Document, place: Place, *, with_text: bool) -> FoundPassage:
    """Return a retrieved document as a tool gives it."""
    metadata = dict(document.metadata)
    score, title, source, page = (metadata.pop(name, None) for name in ("relevance_score", "title", "source", "page"))
    return FoundPassage(
        id=str(document.id),
        title=None if title is None else str(title),
        source=None if source is None else str(source),
        page=page if isinstance(page, int) else None,
        score=float(score) if isinstance(score, int | float) and math.isfinite(score) else None,
        text=document.page_content if with_text else None,
        uri=passage_uri(place, str(document.id)),
        metadata=metadata,
    )


def answer_output(answer: Answer, place: Place, *, with_text: bool) -> AskOutput:
    """Return an answer as the tool gives it."""
    return AskOutput(
        answer=answer.text,
        grounded=answer.grounded,
        sources=[_source(document, place, with_text=with_text) for document in answer.documents],
        citations=[
            CitationOutput(text=one.text, passages=list(one.document_ids), pages=list(one.pages))
            for one in answer.citations
        ],
        warnings=list(answer.warnings),
    )


def _source(document: AnswerDocument, place: Place, *, with_text: bool) -> PassageOutput:
    return PassageOutput(
        id=document.id,
        title=document.title,
        source=document.source,
        page=document.page,
        score=document.score,
        text=document.text if with_text else None,
        uri=passage_uri(place, document.id),
    )


def describe_source(number: int, passage: PassageOutput) -> str:
    """Return the line of a passage for the model: number, title, file, page and address."""
    page = None if passage.page is None else f"page {passage.page}"
    name = ", ".join(filter(None, (passage.title, passage.source, page))) or passage.id
    return f"[{number}] {name} ({passage.uri})"
