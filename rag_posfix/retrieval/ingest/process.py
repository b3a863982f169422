"""Reads files with libraries in a process of its own, which ends where a file takes too much time or memory.

One process reads one file after the other. It starts with the first file, and ends a minute after the last.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from rag_posfix.errors import ConfigError, NotTextError, RetrievalError
from rag_posfix.retrieval.ingest.structure import Block, FileText

ERRORS = {error.__name__: error for error in (RetrievalError, NotTextError, ConfigError)}
_PROGRAM = (
    "import sys; sys.path[:0] = sys.argv[3:]; from rag_posfix.retrieval.ingest.reader_main import main; "
    "main(float(sys.argv[1]), int(sys.argv[2]))"
)
"""It finds its modules where this process does."""


class ReaderProcess:
    """A process that reads files.

    Args:
        seconds: Processor time that a small file may take.
        memory: Bytes that the process may have.
    """

    def __init__(self, seconds: float = 60, memory: int = 2 * 2**30) -> None:
        self._limits = (str(seconds), str(memory))
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def read(self, path: Path) -> FileText:
        """Return the text of a file, as ``readers.read_here`` does.

        Raises:
            RetrievalError: the file cannot be read, or takes too much time or memory.
            ConfigError: the extra that its type needs is not installed.
        """
        with self._lock:
            if os.getpid() != self._owner:  # a copy of the process that started the other one
                self._running, self._owner = None, os.getpid()
            answer = b""
            for _ in range(2):  # it may end, as nobody asked it for a while or it was told to, just when it is asked
                answer, status = self._ask(json.dumps([str(path), os.getcwd()]).encode() + b"\n")
                if answer or status not in (0, -signal.SIGTERM):
                    break
        if not answer:
            raise RetrievalError(f"cannot read {str(path)!r}: {self._reason(status)}; leave the file out")
        value = json.loads(answer)
        if "error" in value:
            raise ERRORS[value["error"]](value["message"])
        blocks = tuple(
            Block(kind, start, end, tuple(headings), *rest) for kind, start, end, headings, *rest in value["blocks"]
        )
        return FileText(
            **{**value, "blocks": blocks, "pages": tuple(value["pages"]), "losses": tuple(value["losses"])}
        )

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            if self._running is not None and os.getpid() == self._owner:
                self._end(self._running)

    def _ask(self, request: bytes) -> tuple[bytes, int]:
        """Return the answer of the process, and its exit status if it ended without one."""
        if self._running is not None and self._running.poll() is not None:
            self._end(self._running)
        process = self._running or self._start()
        assert process.stdin is not None  # noqa: S101 - they are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException:  # an interrupt: its answer would be taken for that of the next file
            process.kill()
            self._end(process)
            raise
        if answer.endswith(b"\n"):
            return answer, 0
        return b"", self._end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        self._running = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *self._limits, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=self._running.wait, daemon=True).start()  # it ends by itself, and leaves no zombie
        return self._running

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        with contextlib.suppress(OSError):
            process.communicate()
        self._running = None
        return process.wait()

    def _reason(self, status: int) -> str:
        if -status in (signal.SIGPROF, signal.SIGALRM):
            return f"reading it takes more than {float(self._limits[0]):g} seconds"
        if -status in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS):
            return f"the library crashed, or it takes more than {int(self._limits[1]) / 2**30:g} GiB of memory"
        return f"the process that reads it ended with status {status}"


_READER = ReaderProcess()
atexit.register(_READER.close)


def read_in_process(path: Path) -> FileText:
    """Return the text of a file, read in the process that all threads share."""
    return _READER.read(path)
