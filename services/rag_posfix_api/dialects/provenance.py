"""The sources of an answer, which this service adds to the responses of chat dialects."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rag_posfix.contracts.answer import Answer

__all__ = ["CitationOutput", "DocumentOutput", "DroppedOutput", "Provenance", "provenance"]


class DocumentOutput(BaseModel):
    """A passage in the prompt."""

    id: str
    score: float | None
    position: int
    attention: float


class CitationOutput(BaseModel):
    """A span of the answer and its source documents."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: int
    end: int
    text: str
    document_ids: list[str]
    origin: Literal["quote", "attention"] = Field(
        alias="from",
        description="How that is known: 'quote', they hold the text word for word; 'attention', one of them dominated "
        "the attention while the sentence was written.",
    )


class DroppedOutput(BaseModel):
    """A document that is not in the prompt, and the reason."""

    id: str
    reason: str


class Provenance(BaseModel):
    """The sources of an answer: the fields that this service adds to the format of the dialect."""

    documents: list[DocumentOutput]
    citations: list[CitationOutput]
    dropped: list[DroppedOutput]
    warnings: list[str] = Field(description="What failed without failing the question, such as a reranker.")
    mitigation: str
    order: str
    cached: bool
    timings: dict[str, float]


def provenance(answer: Answer) -> Provenance:
    """Return the sources of ``answer``."""
    return Provenance(
        documents=[
            DocumentOutput(id=d.id, score=d.score, position=d.position, attention=d.attention)
            for d in answer.documents
        ],
        citations=[
            CitationOutput(start=c.start, end=c.end, text=c.text, document_ids=list(c.document_ids), origin=c.origin)
            for c in answer.citations
        ],
        dropped=[DroppedOutput(id=identity, reason=reason) for identity, reason in answer.dropped],
        warnings=list(answer.warnings),
        mitigation=answer.mitigation,
        order=answer.order,
        cached=answer.cached,
        timings=dict(answer.timings),
    )
