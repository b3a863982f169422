"""The thread that runs the model for all requests: prefill and decode steps, in turns."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence

from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.decode_step import decode_step
from rag_posfix.generation.batching.request_handle import RequestHandle, RunningRequest
from rag_posfix.generation.batching.stepped import SteppedGenerator

CLOSING_SECONDS = 60.0
"""How long ``close`` waits for the prompt or step that the model is at."""


class Worker:
    """Answers requests, first come first served. There is no thread before the first.

    Between two decode steps it prefills at most one prompt: running answers never wait for a whole queue of prompts,
    and a prompt never waits for a running answer to end while fewer than ``max_running`` are decoded.

    Args:
        max_running: Answers that are decoded at the same time.
        on_step: Called before each decode step with the number of answers that share it. Must be quick.
    """

    def __init__(
        self, engine: SteppedGenerator, max_running: int, on_step: Callable[[int], None] | None = None
    ) -> None:
        self._engine = engine
        self._max_running = max_running
        self._on_step = on_step
        # Its lock is reentrant: a garbage collector may call `stop` in a thread that holds it.
        self._changed = threading.Condition()
        self._waiting: deque[RequestHandle] = deque()  # anyone appends; only the thread removes
        self._running: list[RunningRequest] = []  # the thread's own
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many requests wait; the one whose prompt is being read is still among them."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._closed

    def submit(self, handle: RequestHandle) -> None:
        """Take a request in.

        Raises:
            GenerationError: the worker was closed.
        """
        with self._changed:
            if self._closed:
                raise GenerationError("the generator is closed; make a new one")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rag-posfix-generation", daemon=True)
                thread.start()
                self._thread = thread
                # A daemon thread that is still inside the model when the interpreter goes brings the process down.
                atexit.register(self.close)
            self._waiting.append(handle)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread after the prompt or step that it is at. Returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float = CLOSING_SECONDS) -> None:
        """End the thread, fail what is open with ``GenerationError``, and return when that is done.

        Raises:
            GenerationError: the model is still at its prompt or step after ``timeout_seconds``. What is open has
                failed; the thread ends after the step, or with the process.
        """
        thread = self._thread
        self.stop()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_seconds)
        if thread.is_alive():
            with self._changed:
                left = self._open()
            self._fail(left)
            raise GenerationError(
                f"the generator was closed, and the model is still at a prompt or step after {timeout_seconds:g} s; "
                "end the process if it does not return"
            )

    def _run(self) -> None:
        try:
            while self._has_work():
                self._drop_cancelled()
                self._prefill_one()
                self._drop_cancelled()  # prefill takes long
                if self._on_step is not None and self._running:
                    self._on_step(len(self._running))
                self._running = decode_step(self._running)
        finally:
            self._end()

    def _has_work(self) -> bool:
        """Wait for work; return whether there is any to be done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _drop_cancelled(self) -> None:
        """Drop requests that nobody waits for."""
        with self._changed:
            waiting = list(self._waiting)
        for handle in waiting:
            if not handle.still_wanted():
                with self._changed:
                    self._waiting.remove(handle)
        self._running = [one for one in self._running if one.handle.still_wanted()]

    def _prefill_one(self) -> None:
        """Read the prompt that has waited longest and write its first token, if there is room for one more answer."""
        if not self._waiting or len(self._running) >= self._max_running:
            return
        handle = self._waiting[0]  # stays there meanwhile: whatever happens, `_end` finds it
        try:
            running = RunningRequest(self._engine, handle)
            if running.write():
                self._running.append(running)
        except Exception as error:
            handle.fail(error)
        with self._changed:
            self._waiting.popleft()

    def _end(self) -> None:
        with self._changed:
            left = self._open()
            self._waiting.clear()
            self._running = []
            self._thread = None  # where the thread died of itself, the next request starts another
        atexit.unregister(self.close)
        self._fail(left)

    def _open(self) -> list[RequestHandle]:
        return [*self._waiting, *(one.handle for one in self._running)]

    def _fail(self, handles: Sequence[RequestHandle]) -> None:
        how = "was closed" if self._closed else "stopped"
        for handle in handles:
            handle.fail(GenerationError(f"the generator {how} before the answer was complete; ask again"))
