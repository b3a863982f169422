"""The processes that hold the other ranks of a model on this machine: started, watched, ended."""

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


def _do_nothing() -> None:
    """The default of ``on_failure`` and ``on_close``."""


class Processes:
    """Programs that run while this one does.

    torchrun ends its whole tree with one process and cannot end it with its own parent, so that they are started here:
    each holds the reading end of a pipe whose other end is here, and detects the exit of this process, however it
    ended. Ctrl-C does not reach them: this process ends them. If one ends by itself, all are ended.

    Args:
        commands: Arguments of the interpreter, one list for each program; the first is rank 1.
        folder: Shared by the programs; removed by ``close``.
        variables: Environment variables that they inherit.
        on_failure: Called in a thread when one has ended by itself, while the other programs are being ended.
        on_close: Called at the beginning of ``close``.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        folder: Path | None,
        variables: Mapping[str, str],
        on_failure: Callable[[], None] = _do_nothing,
        on_close: Callable[[], None] = _do_nothing,
    ) -> None:
        self._folder = folder
        self._on_failure, self._on_close = on_failure, on_close
        self._count = len(commands) + 1
        self._changed = threading.Condition()
        self._ending = False
        self._failure: str | None = None
        self._running: list[subprocess.Popen[bytes]] = []
        # Also at the end of the interpreter, if nobody has called `close`.
        self._end = weakref.finalize(self, _end, self._running, folder)
        # They find their modules where this process does; -P leaves the current folder out.
        inherited = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            for rank, command in enumerate(commands, start=1):
                with self._log_of(rank).open("wb") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-P", *command],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=log,
                        env={**inherited, "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                self._running.append(process)
                threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
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
            self._changed.wait_for(lambda: self._failure is not None, patience_seconds)
            return self._failure

    def kill(self) -> None:
        """End them all at once; what waits for them fails."""
        with self._changed:
            self._ending = True
        for process in self._running:
            process.kill()

    def close(self) -> None:
        """Wait for them to end, at most ten seconds, and remove what they shared."""
        with self._changed:
            self._ending = True
        self._on_close()
        deadline = time.monotonic() + ENDING_SECONDS
        for process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
        self._end()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._changed:
            if self._ending:
                return
            self._ending = True
            last_line = self._last_line(rank)
            self._failure = f"the process of rank {rank} of {self._count} ended with exit code {code}{last_line}"
            self._changed.notify_all()
        for other in self._running:
            other.kill()
        self._on_failure()

    def _last_line(self, rank: int) -> str:
        """Return the last line that a process wrote, to follow its exit code."""
        try:
            lines = self._log_of(rank).read_bytes()[-MAX_LOG_BYTES:].decode(errors="replace").split("\n")
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f" ({last[:300]})" if last else ""

    def _log_of(self, rank: int) -> Path:
        return (self._folder or Path()) / f"rank-{rank}.log"


def _end(running: Sequence[subprocess.Popen[bytes]], folder: Path | None) -> None:
    for process in running:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
