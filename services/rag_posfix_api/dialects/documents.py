"""Documents in requests: a string, an object, or Cohere's nested ``data``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Discriminator, FiniteFloat, Strict, Tag, WithJsonSchema, model_validator

from rag_posfix_api.http.errors import TooManyDocumentsError

__all__ = ["DocumentInput", "DocumentObject", "Forms", "check_count", "document_text", "to_documents"]


def _form(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, list | tuple):
        return "array"
    return "object" if isinstance(value, dict | BaseModel) else "other"


def Forms(*allowed: str) -> Discriminator:  # reads as an annotation, as Field and Discriminator do
    """Choose the member of a union by the JSON type of the value, so that errors name one member only.

    Args:
        allowed: The tags of the union, of ``string``, ``array`` and ``object``.
    """
    return Discriminator(
        _form,
        custom_error_type="form",
        custom_error_message=f"input should be of type {' or '.join(allowed)}",
    )


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


def to_documents(given: Sequence[str | DocumentObject], max_documents: int) -> list[Document]:
    """Return the documents of a request. A document without an id gets its index as id: ``doc_0``, ``doc_1``, ...

    Args:
        given: The documents of the request.
        max_documents: Maximum number of documents.
    """
    check_count(len(given), max_documents)
    return [_document(document, index) for index, document in enumerate(given)]


def check_count(count: int, max_documents: int, param: str = "documents") -> None:
    """Raise for too many documents.

    Args:
        count: Number of documents.
        max_documents: Maximum number of documents.
        param: The field of the documents.
    """
    if count > max_documents:
        raise TooManyDocumentsError(
            f"{param} has {count} entries, at most {max_documents} are allowed; send the best ones", param=param
        )


def _document(given: str | DocumentObject, index: int) -> Document:
    if isinstance(given, str):
        return Document(page_content=given, id=f"doc_{index}")
    known = {"title": given.heading, "relevance_score": given.relevance}
    return Document(
        page_content=given.content or "",
        metadata={name: value for name, value in known.items() if value is not None},
        id=given.id or f"doc_{index}",
    )
