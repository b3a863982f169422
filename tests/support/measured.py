"""Questions about three passages, and pipelines that find them, to measure in milliseconds."""

from __future__ import annotations

from langchain_core.documents import Document

from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline, Question
from rag_posfix.retrieval.base import as_retriever
from tests.support.serving import make_pipeline

TEXTS = {"red": "The red house is tall.", "green": "A green boat is slow.", "blue": "One blue car is new."}


def shelf(question: str) -> list[Document]:
    """Return the three passages, whatever is asked."""
    return [
        Document(page_content=text, id=name, metadata={"relevance_score": 0.9 - 0.2 * rank})
        for rank, (name, text) in enumerate(TEXTS.items())
    ]


def texts(count: int) -> list[tuple[str, Question]]:
    """Return questions with their ids."""
    return [(str(number), Question(f"Which colour is house number {number}?")) for number in range(count)]


def pipeline_of(generator: FakeGenerator) -> Pipeline:
    """Return a pipeline that finds the three passages for every question."""
    return make_pipeline(generator, retriever=as_retriever(shelf))
