"""A chain of langchain compressors and transformers, each a run of its own in a trace."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.runnables import RunnableConfig, RunnableLambda

__all__ = ["DocumentStep", "acompress", "compress"]

DocumentStep: TypeAlias = BaseDocumentCompressor | BaseDocumentTransformer
"""A reranker, a filter, a text compressor (they see the question) or a transformer (they do not)."""


def compress(
    steps: Sequence[DocumentStep], documents: Sequence[Document], query: str, callbacks: Any = None
) -> list[Document]:
    """Return what the steps make of the documents, one after another; nothing is asked about no documents.

    Args:
        steps: The chain; may be empty.
        documents: What goes in; left untouched by this function.
        query: The question.
        callbacks: Parent of the runs.
    """
    kept = list(documents)
    for step in steps:
        if kept:
            kept = _run_of(step, query).invoke(kept, {"callbacks": callbacks})
    return kept


async def acompress(
    steps: Sequence[DocumentStep], documents: Sequence[Document], query: str, callbacks: Any = None
) -> list[Document]:
    """Do what ``compress`` does with the steps' asynchronous methods.

    Args:
        steps: The chain; may be empty.
        documents: What goes in; left untouched by this function.
        query: The question.
        callbacks: Parent of the runs.
    """
    kept = list(documents)
    for step in steps:
        if kept:
            kept = await _run_of(step, query).ainvoke(kept, {"callbacks": callbacks})
    return kept


def _run_of(step: DocumentStep, query: str) -> RunnableLambda[list[Document], list[Document]]:
    def run(documents: list[Document], config: RunnableConfig) -> list[Document]:
        if isinstance(step, BaseDocumentCompressor):
            return list(step.compress_documents(documents, query, **_callbacks(step.compress_documents, config)))
        return list(step.transform_documents(documents))

    async def arun(documents: list[Document], config: RunnableConfig) -> list[Document]:
        if isinstance(step, BaseDocumentCompressor):
            given = _callbacks(step.acompress_documents, config)
            return list(await step.acompress_documents(documents, query, **given))
        return list(await step.atransform_documents(documents))

    return RunnableLambda(run, afunc=arun, name=type(step).__name__)


def _callbacks(method: Any, config: RunnableConfig) -> dict[str, Any]:
    """Return the callbacks as an argument, where the method takes it: older compressors do not."""
    return {"callbacks": config.get("callbacks")} if "callbacks" in inspect.signature(method).parameters else {}
