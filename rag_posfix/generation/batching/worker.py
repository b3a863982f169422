"""The one thread that runs the model for all requests: reads prompts and decodes, in turns."""

from __future__ import annotations

import atexit
import threading
from collections import deque

from rag_posfix.errors import GenerationError
from rag_posfix.generation.batching.request_handle import Delivery, Running
from rag_posfix.generation.batching.step import step
from rag_posfix.generation.batching.stepped import SteppedGenerator

__all__ = ["Worker"]


class Worker:
    """Answers deliveries, first come first served. There is no thread before the first.

    Between two decode steps it reads at most one prompt, so that neither do running answers stand still behind a
    queue of prompts, nor does a prompt wait for a running answer to end while there is room.

    Args:
        engine: The model.
        max_running: Answers that are decoded at the same time.
    """

    def __init__(self, engine: SteppedGenerator, max_running: int) -> None:
        self._engine = engine
        self._max_running = max_running
        # Its lock is reentrant: a garbage collector may call `stop` in a thread that holds it.
        self._changed = threading.Condition()
        self._waiting: deque[Delivery] = deque()  # anyone appends; only the thread removes
        self._running: list[Running] = []  # the thread's own
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

    def submit(self, delivery: Delivery) -> None:
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
            self._waiting.append(delivery)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread after the prompt or step that it is at. Returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, fail what is open with ``GenerationError``, and return when that is done."""
        thread = self._thread
        self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        try:
            while self._has_work():
                self._drop_unwanted()
                self._read_one()
                self._drop_unwanted()  # reading takes long
                self._running = step(self._running)
        finally:
            self._end()

    def _has_work(self) -> bool:
        """Wait for work; return whether there is any to be done."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._running)
            return not self._closed

    def _drop_unwanted(self) -> None:
        """Let go of requests that nobody waits for."""
        with self._changed:
            waiting = list(self._waiting)
        for delivery in waiting:
            if not delivery.is_wanted():
                with self._changed:
                    self._waiting.remove(delivery)
        self._running = [one for one in self._running if one.delivery.is_wanted()]

    def _read_one(self) -> None:
        """Read the prompt that has waited longest and write its first token, if there is room for one more answer."""
        if not self._waiting or len(self._running) >= self._max_running:
            return
        delivery = self._waiting[0]  # stays there meanwhile: whatever happens, `_end` finds it
        try:
            running = Running(self._engine, delivery)
            if running.write():
                self._running.append(running)
        except Exception as error:
            delivery.fail(error)
        with self._changed:
            self._waiting.popleft()

    def _end(self) -> None:
        with self._changed:
            left = [*self._waiting, *(one.delivery for one in self._running)]
            self._waiting.clear()
            self._running = []
            self._thread = None  # where the thread died of itself, the next request starts another
        atexit.unregister(self.close)
        how = "was closed" if self._closed else "stopped"
        for delivery in left:
            delivery.fail(GenerationError(f"the generator {how} before the answer was complete; ask again"))
