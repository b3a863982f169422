"""Documents as clients send them: text, an object, or Cohere's nested ``data``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Discriminator, FiniteFloat, Tag, model_validator

from rag_posfix_api.http.errors import TooLargeError

__all__ = ["DocumentInput", "DocumentObject", "Forms", "check_count", "document_text", "to_documents"]


def _form(value: Any) -> str:
    if isinstance(value, str):
        return "string"
    if isinstance(value, list | tuple):
        return "array"
    return "object" if isinstance(value, dict | BaseModel) else "other"


def Forms(*allowed: str) -> Discriminator:  # reads as an annotation, as Field and Discriminator do
    """Choose the member of a union by the JSON type of the value, so that errors speak of one form only.

    Args:
        allowed: The tags of the union, of ``string``, ``array`` and ``object``.
    """
    return Discriminator(
        _form,
        custom_error_type="form",
        custom_error_message=f"input should be of type {' or '.join(allowed)}",
    )


class DocumentData(BaseModel):
    """The content of a document in Cohere's form."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    title: str | None = None
    text: str | None = None
    snippet: str | None = None


class DocumentObject(BaseModel):
    """A document: its text, or Cohere's ``data``, and what is known of it."""

    model_config = ConfigDict(extra="ignore", coerce_numbers_to_str=True)

    id: str | None = None
    title: str | None = None
    text: str | None = None
    data: DocumentData | None = None
    score: FiniteFloat | None = None
    relevance_score: FiniteFloat | None = None

    @model_validator(mode="after")
    def _has_text(self) -> DocumentObject:
        if self.content is None:
            raise ValueError("a document needs its text in 'text', 'data.text' or 'data.snippet'")
        return self

    @property
    def content(self) -> str | None:
        """The text, wherever it stands."""
        data = self.data or DocumentData()
        return next((text for text in (self.text, data.text, data.snippet) if text is not None), None)

    @property
    def heading(self) -> str | None:
        """The title, wherever it stands."""
        return self.title if self.title is not None or self.data is None else self.data.title

    @property
    def relevance(self) -> float | None:
        """The score, whatever it is called."""
        return self.score if self.relevance_score is None else self.relevance_score


DocumentInput = Annotated[
    Annotated[str, Tag("string")] | Annotated[DocumentObject, Tag("object")], Forms("string", "object")
]
"""A document as clients send it."""


def document_text(document: str | DocumentObject) -> str:
    """Return the text of a document in either form."""
    return document if isinstance(document, str) else document.content or ""


def to_documents(given: Sequence[str | DocumentObject], max_documents: int) -> list[Document]:
    """Return the documents of a request; those without an id are called by their place in it, ``doc_0``, ...

    Args:
        given: The documents as the client sent them.
        max_documents: Most that are allowed.
    """
    check_count(len(given), max_documents)
    return [_document(document, index) for index, document in enumerate(given)]


def check_count(count: int, max_documents: int) -> None:
    """Refuse too many documents.

    Args:
        count: How many there are.
        max_documents: How many are allowed.
    """
    if count > max_documents:
        raise TooLargeError(
            f"documents has {count} entries, at most {max_documents} are allowed; send the best ones",
            param="documents",
        )


def _document(given: str | DocumentObject, index: int) -> Document:
    if isinstance(given, str):
        given = DocumentObject(text=given)
    known = {"title": given.heading, "relevance_score": given.relevance}
    return Document(
        page_content=given.content or "",
        metadata={name: value for name, value in known.items() if value is not None},
        id=given.id or f"doc_{index}",
    )
