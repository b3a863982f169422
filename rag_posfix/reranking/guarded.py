"""Runs a reranker with a deadline; if it fails or is late, the documents keep their order."""

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
from rag_posfix.reranking.deadline import deadline

__all__ = ["GuardedReranker"]

_log = logging.getLogger(__name__)

MAX_THREADS = 8
"""Maximum number of concurrent rerankings, late ones that still run included; others wait, within their deadlines."""

CLOSING_SECONDS = 5.0
"""How long ``close`` waits for late rerankings to stop."""


class GuardedReranker(BaseDocumentCompressor):
    """Fails open: if the reranker fails, the documents are returned in their order instead of no answer.

    If the reranker raises, or takes longer than its deadline, a warning is logged, the failure is counted, and copies
    of the documents are returned in the given order, with the scores that they had, if any. Errors of the caller (an
    empty question, a malformed document: ``ConfigError``) are raised.

    A late reranking goes on in its thread. Rerankers that use a model in steps (all but ``embedding``) check the
    deadline between two steps and stop there, which releases the model.

    Attributes:
        reranker: The reranker.
        deadline_seconds: Time limit in seconds; None for no limit, in the thread of the caller.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reranker: BaseDocumentCompressor
    deadline_seconds: float | None = Field(default=None, gt=0)
    _runner: DeadlineRunner = PrivateAttr(default_factory=lambda: DeadlineRunner("rag-posfix-reranking", MAX_THREADS))
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)
    _counts: dict[str, int] = PrivateAttr(default_factory=lambda: {"error": 0, "timeout": 0})

    @property
    def failures(self) -> int:
        """How often the reranker raised an error."""
        return self.counts()["error"]

    @property
    def timeouts(self) -> int:
        """How often it was late."""
        return self.counts()["timeout"]

    def counts(self) -> dict[str, int]:
        """Return how often documents kept their order because of a failure, by reason: ``error`` and ``timeout``."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the threads, after waiting for late rerankings to stop. Later rerankings count as failed."""
        until = time.monotonic() + CLOSING_SECONDS
        while self._runner.running and time.monotonic() < until:
            time.sleep(0.02)
        self._runner.close()

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the reranked documents; copies of ``documents`` in their order if the reranker fails.

        Args:
            documents: The documents; left untouched.
            query: The question.
            callbacks: Passed to the reranker.

        Raises:
            ConfigError: the question is empty, or a document is malformed.
        """

        def run() -> Sequence[Document]:
            return self.reranker.compress_documents(documents, query, callbacks)

        try:
            with deadline(self.deadline_seconds):
                if self.deadline_seconds is None:
                    return run()
                return self._runner.run(partial(copy_context().run, run), self.deadline_seconds)
        except ConfigError:
            raise
        except Exception as error:
            return self._in_given_order(documents, error)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does with the reranker's asynchronous method.

        Args:
            documents: The documents; left untouched.
            query: The question.
            callbacks: Passed to the reranker.
        """
        try:
            with deadline(self.deadline_seconds):
                async with asyncio.timeout(self.deadline_seconds):
                    return await self.reranker.acompress_documents(documents, query, callbacks)
        except ConfigError:
            raise
        except Exception as error:
            return self._in_given_order(documents, error)

    def _in_given_order(self, documents: Sequence[Document], error: Exception) -> list[Document]:
        """Log and count the failure, and return copies. The error's text is not logged: it may quote documents."""
        late = isinstance(error, TimeoutError | RerankingTimeoutError)
        with self._lock:
            self._counts["timeout" if late else "error"] += 1
        name = type(self.reranker).__name__
        if late:
            _log.warning("%s took longer than %g s; the documents keep their order", name, self.deadline_seconds or 0)
        else:
            _log.warning("%s failed (%s); the documents keep their order", name, type(error).__name__)
        return [one.model_copy(update={"metadata": dict(one.metadata or {})}) for one in documents]
