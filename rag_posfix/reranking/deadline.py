"""Deadlines of rerankings, and the reranker that keeps the given order when another reranker fails or is late.

A thread cannot be stopped from outside. A reranker that computes in steps calls ``check_deadline`` before each of
them, so that it releases the model within one step after its deadline, or after the end of its request. Deadlines are
passed through a context variable, because langchain's interface has no argument for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr

from rag_posfix.caching.tier import DeadlineRunner
from rag_posfix.cancellation import check_cancelled
from rag_posfix.checked import Checked
from rag_posfix.contracts.answer import warn
from rag_posfix.contracts.retrieval import DETAILS, QUESTION_TOO_LONG, RerankerFailures, RerankerHealth
from rag_posfix.errors import ConfigError, PromptTooLongError, RerankingTimeoutError

_DEADLINE: ContextVar[float] = ContextVar("rag_posfix_reranking_deadline", default=math.inf)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """End rerankings in the ``with`` block after ``seconds``, or at an earlier deadline around it; None sets none."""
    until = math.inf if seconds is None else time.monotonic() + seconds
    token = _DEADLINE.set(min(until, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_deadline() -> None:
    """Return if the current reranking may go on.

    Raises:
        RerankingTimeoutError: its time is over.
        RagPosfixError: the request has ended, as ``check_cancelled`` says.
    """
    check_cancelled()
    if time.monotonic() > _DEADLINE.get():
        raise RerankingTimeoutError("the reranking took longer than its deadline and was stopped between two steps")


_log = logging.getLogger(__name__)

MAX_THREADS = 8
"""Maximum number of concurrent rerankings, late ones that still run included; others wait, within their deadlines."""

CLOSING_SECONDS = 5.0
"""How long ``close`` waits for late rerankings to stop."""

UNRANKED = "the documents keep their order"
"""The end of the warning in an answer whose passages were not reranked."""


class GuardedReranker(Checked, BaseDocumentCompressor):
    """Fails open: if the reranker fails, the documents are returned in their order instead of no answer.

    If the reranker raises, or takes longer than its deadline, a warning is logged and added to ``Answer.warnings``.
    The failure is counted, and copies of the documents are returned in the given order, with the scores that they had,
    if any. Errors of the caller (an empty question, a malformed document: ``ConfigError``) are raised.

    A late reranking goes on in its thread. Rerankers that use a model in steps (all but ``embedding``) check the
    deadline between two steps and stop there, which releases the model.

    Attributes:
        reranker: The reranker.
        deadline_seconds: Time limit in seconds; None for no limit, in the thread of the caller.
        health: Counts the failures; may be shared with other rerankers, and counts by name.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    reranker: BaseDocumentCompressor
    deadline_seconds: float | None = Field(default=None, gt=0)
    health: RerankerHealth = Field(default_factory=RerankerHealth, repr=False)
    _runner: DeadlineRunner = PrivateAttr(default_factory=lambda: DeadlineRunner("rag-posfix-reranking", MAX_THREADS))

    @property
    def name(self) -> str:
        """Name of the reranker in the registry, or of its class."""
        name = getattr(self.reranker, "name", None)
        return name if isinstance(name, str) else type(self.reranker).__name__

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
        return dict(self.health.failures().get(self.name, RerankerFailures()).counts)

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

        Raises:
            ConfigError: the question is empty, or a document is malformed.
        """

        def run() -> Sequence[Document]:
            return self.reranker.compress_documents(documents, query, callbacks)

        try:
            with deadline(self.deadline_seconds):
                if self.deadline_seconds is None:
                    ranked = run()
                else:
                    ranked = self._runner.run(partial(copy_context().run, run), self.deadline_seconds)
        except ConfigError:
            raise
        except Exception as error:
            check_cancelled()  # a request that has ended is no failure of the reranker
            return self._report_failure(documents, error)
        self.health.count_success(self.name)
        return ranked

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Do what ``compress_documents`` does with the reranker's asynchronous method."""
        try:
            with deadline(self.deadline_seconds):
                async with asyncio.timeout(self.deadline_seconds):
                    ranked = await self.reranker.acompress_documents(documents, query, callbacks)
        except ConfigError:
            raise
        except Exception as error:
            check_cancelled()  # a request that has ended is no failure of the reranker
            return self._report_failure(documents, error)
        self.health.count_success(self.name)
        return ranked

    def _report_failure(self, documents: Sequence[Document], error: Exception) -> list[Document]:
        """Report the failure; return copies in the given order. Leave out the error's text: it may hold documents."""
        details: dict[str, Any] = {}
        if isinstance(error, PromptTooLongError):  # the caller's fault
            problem = "has no room for a passage beside this question"
            details = {DETAILS: {"reranker": self.name, "read": False, QUESTION_TOO_LONG: True}}
        else:
            late = isinstance(error, TimeoutError | RerankingTimeoutError)
            self.health.count_failure(self.name, error, "timeout" if late else "error")
            reason = f"failed ({type(error).__name__})"
            problem = f"took longer than {self.deadline_seconds or 0:g} s" if late else reason
        message = f"reranker {self.name} {problem}; {UNRANKED}"
        _log.warning("%s", message)
        warn(message)
        copies = ({"metadata": (document.metadata or {}) | details} for document in documents)
        return [document.model_copy(update=copy) for document, copy in zip(documents, copies, strict=True)]
