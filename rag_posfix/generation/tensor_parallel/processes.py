"""The processes that hold the other ranks of a model on this machine: started, watched, ended.

Knows programs and their ends; nothing of models.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ENDING_SECONDS = 10.0
MAX_LOG_BYTES = 1 << 14


class Processes:
    """Programs that run while this one does. Implements ``leader.WorkerGroup``.

    Each holds the reading end of a pipe whose other end is here, so that it learns when this process is gone, however
    it ended. Ctrl-C does not reach them: this process ends them. If one ends by itself, the others are ended too.

    Args:
        commands: Arguments of the interpreter, one list for each program; the first is rank 1.
        folder: What the programs share; removed by ``close``.
        variables: Environment variables that they inherit.
        on_failure: Called in a thread when one has ended by itself and the others are being ended.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path,
        variables: Mapping[str, str],
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._folder = folder
        self._variables = dict(variables)
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._ending = False
        self._failed: tuple[int, int] | None = None  # rank, exit code
        self._running: list[subprocess.Popen[bytes]] = []
        # Also at the end of the interpreter, if nobody has called `close`.
        self._end = weakref.finalize(self, _end, self._running, folder)
        try:
            for rank, command in enumerate(commands, start=1):
                self._start(rank, command)
        except OSError:
            self._ending = True
            self._end()
            raise

    @staticmethod
    def shared_folder() -> Path:
        """Return a new folder that only this user can read."""
        return Path(tempfile.mkdtemp(prefix="rag-posfix-ranks-"))

    def failure(self, patience_seconds: float = 0.0) -> str | None:
        """Return which one ended by itself, and how; None if none has by the end of the patience."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed is not None, patience_seconds)
            if self._failed is None:
                return None
            rank, code = self._failed
        return f"the process of rank {rank} of {len(self._running) + 1} ended with exit code {code}{self._said(rank)}"

    def kill(self) -> None:
        """End them all at once."""
        with self._changed:
            self._ending = True
        for process in self._running:
            process.kill()

    def close(self) -> None:
        """Wait for them to end, at most ten seconds, and remove what they shared."""
        with self._changed:
            self._ending = True
        deadline = time.monotonic() + ENDING_SECONDS
        for process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
        self._end()

    def _start(self, rank: int, command: Sequence[str]) -> None:
        with self._log_of(rank).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                # They find their modules where this process does; -P leaves the current folder out.
                env={
                    **self._variables,
                    "LOCAL_RANK": str(rank),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                start_new_session=True,
            )
        self._running.append(process)
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._changed:
            if self._ending:
                return
            self._ending, self._failed = True, (rank, code)
            self._changed.notify_all()
        for other in self._running:
            other.kill()
        if self._on_failure is not None:
            self._on_failure()

    def _said(self, rank: int) -> str:
        """Return the last line that a process wrote, to follow its exit code."""
        try:
            lines = self._log_of(rank).read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last[:300]})" if last else ""

    def _log_of(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"


def _end(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in running:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
