"""One check for all who ask at the same time: probes come from everywhere, without a key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import anyio.to_thread

from rag_posfix_api.http.errors import NotReadyError

_FRESH_SECONDS = 1.0


class SharedCheck:
    """Runs a function in one thread at a time; its result holds for a second. For one event loop at a time.

    Args:
        function: Raises what is wrong. One that hangs is not started again while it does.
        timeout: How long ``wait`` waits for it.
        subject: Names it in the error of a timeout.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        function: Callable[[], None],
        timeout: float,
        subject: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._function = function
        self._timeout = timeout
        self._subject = subject
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def wait(self) -> None:
        """Raise what the function raises; NotReadyError if it has no result in time."""
        task = self._task
        if task is None or (task.done() and self._clock() - self._ended >= _FRESH_SECONDS) or _of_other_loop(task):
            task = self._task = asyncio.create_task(self._run())
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody waits then
        done, _ = await asyncio.wait({task}, timeout=self._timeout)
        if not done:
            raise NotReadyError(f"{self._subject} does not answer within {self._timeout:g} seconds")
        task.result()

    async def _run(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._function, abandon_on_cancel=True)
        finally:
            self._ended = self._clock()


def _of_other_loop(task: asyncio.Task[None]) -> bool:
    return task.get_loop() is not asyncio.get_running_loop()
