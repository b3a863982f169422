"""What rerankers that ask the served model share: taking turns, and the words around documents."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import PrivateAttr, field_validator
from pydantic_core import PydanticCustomError

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.contracts.generator import Generator, PassageReader
from rag_posfix.reranking.deadline import check_time
from rag_posfix.reranking.scoring import ScoringReranker

__all__ = ["GenerativeReranker", "ReadingReranker"]

_PATIENCE_SECONDS = 0.05


class GenerativeReranker(ScoringReranker):
    """Base of rerankers that use the served model. One ranking at a time runs the model; others wait for it.

    Cancelled, the model stops within one step. A copy says ``long_document: "truncated"`` where its end was not read.

    Attributes:
        generator: The served model.
        top_n: How many passages to return, all if None.
    """

    generator: Generator
    _turns: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    @property
    def _template(self) -> PromptTemplate:
        """The words of an answer's prompt, so that what is kept of documents serves answers too."""
        return PromptTemplate()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        while not self._turns.acquire(timeout=_PATIENCE_SECONDS):
            check_time()
        try:
            check_time()
            yield
        finally:
            self._turns.release()


class ReadingReranker(GenerativeReranker):
    """Base of rerankers that look at what the model makes of documents while it reads them; nothing is generated.

    Attributes:
        generator: The served model; an ``Engine``, or a ``BatchingGenerator`` around one.
        top_n: How many passages to return, all if None.
    """

    generator: PassageReader

    @field_validator("generator", mode="before")
    @classmethod
    def _reads_passages(cls, value: Any) -> Any:
        if not isinstance(value, PassageReader):
            raise PydanticCustomError(
                "passage_reader",
                "{kind} cannot read passages for a reranker; use an Engine (load_engine, tp=1), or the embedding, "
                "cross_encoder or listwise reranker",
                {"kind": type(value).__name__},
            )
        return value
