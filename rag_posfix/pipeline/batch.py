"""Many questions at once: threads that prepare them, while the generator shares its steps between their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from rag_posfix.cancellation import run_until_cancelled
from rag_posfix.checked import check_type
from rag_posfix.contracts.answer import Answer, Question
from rag_posfix.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

AT_ONCE = 16
"""Questions that are open at the same time: twice what the generator decodes, so that it never waits for a prompt."""


class AskedInBatches(ABC):
    """Asks many questions at once with ``ask``, which must be safe to call from several threads."""

    @abstractmethod
    def ask(self, question: Question | str) -> Answer:
        """Return the answer to one question."""

    def batch(
        self,
        questions: Sequence[Question | str],
        *,
        return_exceptions: bool = False,
        max_concurrency: int | None = None,
    ) -> list[Any]:
        """Return the answers to several questions, in their order; they share the steps of the model.

        Answers equal those of ``ask``, one question after another (docs/serving.md has the exact guarantee).

        Args:
            return_exceptions: Whether a question that failed has its exception in the list; else the first failure is
                raised, after the questions that were begun.
            max_concurrency: Most questions that are open at the same time; 16 if None.

        Raises:
            RagPosfixError: as in ``ask``, unless ``return_exceptions``; or ``max_concurrency`` is below 1.
        """
        answers: dict[int, Answer | Exception] = {}
        with closing(self.batch_as_completed(questions, max_concurrency=max_concurrency)) as results:
            for index, result in results:
                if isinstance(result, Exception) and not return_exceptions:
                    raise result
                answers[index] = result
        return [answers[index] for index in range(len(questions))]

    def batch_as_completed(
        self, questions: Sequence[Question | str], *, max_concurrency: int | None = None
    ) -> Generator[tuple[int, Answer | Exception], None, None]:
        """Yield the index of each question with its answer or its exception, as soon as there is one.

        Closing the iterator begins no further question, and waits for those that were begun.
        """
        check_type("questions", questions, list | tuple, "a list of questions")
        at_once = checked_concurrency(max_concurrency)
        return as_completed(self.ask, questions, at_once)

    async def abatch(
        self,
        questions: Sequence[Question | str],
        *,
        return_exceptions: bool = False,
        max_concurrency: int | None = None,
    ) -> list[Any]:
        """Do what ``batch`` does in other threads, without blocking the event loop; cancelled, it stops."""
        return await run_until_cancelled(
            partial(self.batch, questions, return_exceptions=return_exceptions, max_concurrency=max_concurrency)
        )


def checked_concurrency(max_concurrency: int | None) -> int:
    """Return how many questions may be open at the same time; ``AT_ONCE`` for None."""
    check_type("max_concurrency", max_concurrency, int | None, "a whole number, or None")
    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"max_concurrency={max_concurrency} must be >= 1, or None for {AT_ONCE}")
    return max_concurrency or AT_ONCE


def as_completed(
    call: Callable[[Item], Result], items: Sequence[Item], at_once: int
) -> Generator[tuple[int, Result | Exception], None, None]:
    """Yield the index of each item and what ``call`` returned or raised for it, in the order in which they end.

    Items begin in their order, ``at_once`` of them in a thread each. Closing the iterator begins no further item, and
    waits for those that are open.
    """
    waiting = iter(enumerate(items))
    running: dict[Future[Result], int] = {}
    with ThreadPoolExecutor(at_once, thread_name_prefix="rag-posfix-batch") as pool:
        while True:
            while len(running) < at_once and (entry := next(waiting, None)) is not None:
                index, item = entry
                running[pool.submit(copy_context().run, call, item)] = index
            if not running:
                return
            for future in sorted(wait(running, return_when=FIRST_COMPLETED).done, key=running.__getitem__):
                index, error = running.pop(future), future.exception()
                if error is None:
                    yield index, future.result()
                elif isinstance(error, Exception):
                    yield index, error
                else:
                    raise error
