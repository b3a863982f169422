"""Runs a reranker within a deadline; where it fails or is late, the documents stay as they came."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from functools import partial

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr

from rag_posfix.caching.deadline import DeadlineRunner
from rag_posfix.errors import ConfigError, RerankingTimeoutError
from rag_posfix.reranking.deadline import watched

__all__ = ["GuardedReranker"]

_log = logging.getLogger(__name__)

MOST_THREADS = 8
"""Rankings at a time that have a deadline, those left behind included; further ones wait, within their deadlines."""


CLOSING_SECONDS = 5.0


class GuardedReranker(BaseDocumentCompressor):
    """Fails open: an answer from documents in their first order is better than none.

    A reranker that raises, or takes longer than its deadline, is logged with a warning and counted; copies of the
    documents come back in their incoming order, with the scores that they had, or none. What the caller did wrong (an
    empty question, a malformed document: ``ConfigError``) is raised.

    A ranking that is late is left behind in its thread. Those that ask a model in steps (all but ``embedding``) look
    at the deadline between two steps and stop there, so that they do not keep the model.

    Attributes:
        reranker: What is run.
        deadline_seconds: How long it may take; None for as long as it wants, in the thread of the caller.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reranker: BaseDocumentCompressor
    deadline_seconds: float | None = Field(default=None, gt=0)
    _runner: DeadlineRunner = PrivateAttr(default_factory=lambda: DeadlineRunner("rag-posfix-reranking", MOST_THREADS))
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _counts: dict[str, int] = PrivateAttr(default_factory=lambda: {"error": 0, "timeout": 0})

    @property
    def failures(self) -> int:
        """How often the reranker raised."""
        return self.counts()["error"]

    @property
    def timeouts(self) -> int:
        """How often it was late."""
        return self.counts()["timeout"]

    def counts(self) -> dict[str, int]:
        """Return how often documents came back as they came, by reason: ``error`` and ``timeout``."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the threads, once those that look at their deadline have done so. Later rankings count as failed."""
        patience = time.monotonic() + CLOSING_SECONDS
        while self._runner.running and time.monotonic() < patience:
            time.sleep(0.02)
        self._runner.close()

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return what the reranker returns, or copies of ``documents`` in their order.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Handed on.

        Raises:
            ConfigError: the question or a document is at fault.
        """

        def run() -> Sequence[Document]:
            return self.reranker.compress_documents(documents, query, callbacks)

        try:
            with watched(self.deadline_seconds):
                if self.deadline_seconds is None:
                    return run()
                return self._runner.run(partial(copy_context().run, run), self.deadline_seconds)
        except ConfigError:
            raise
        except Exception as error:
            return self._as_they_came(documents, error)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does with the reranker's asynchronous method.

        Args:
            documents: What to score; left untouched.
            query: The question.
            callbacks: Handed on.
        """
        try:
            with watched(self.deadline_seconds):
                async with asyncio.timeout(self.deadline_seconds):
                    return await self.reranker.acompress_documents(documents, query, callbacks)
        except ConfigError:
            raise
        except Exception as error:
            return self._as_they_came(documents, error)

    def _as_they_came(self, documents: Sequence[Document], error: Exception) -> list[Document]:
        """Count the failure and return copies. Only the type of the error is logged: its text may quote documents."""
        late = isinstance(error, TimeoutError | RerankingTimeoutError)
        with self._lock:
            self._counts["timeout" if late else "error"] += 1
        name = type(self.reranker).__name__
        if late:
            _log.warning("%s took longer than %g s; the documents keep their order", name, self.deadline_seconds or 0)
        else:
            _log.warning("%s failed (%s); the documents keep their order", name, type(error).__name__)
        return [one.model_copy(update={"metadata": dict(one.metadata or {})}) for one in documents]
