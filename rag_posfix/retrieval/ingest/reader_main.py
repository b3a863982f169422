"""The process that reads files with libraries; ``process.ReaderProcess`` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

from rag_posfix.retrieval.ingest.process import ERRORS
from rag_posfix.retrieval.ingest.readers import read_here

_IDLE_SECONDS = 60
_WALL_FACTOR = 10
_SECONDS_PER_MIB, _BYTES_PER_BYTE = 20, 16
"""What a file may take more for its size: a book of 3,000 pages, 30 MiB, takes some minutes of processor time."""


def main(seconds: float, memory: int) -> None:
    """Read the files whose paths come in, one a line, until the input ends or nothing comes for a while."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is no answer
    while select.select([requests], [], [], _IDLE_SECONDS)[0]:
        line = requests.readline()
        if not line:
            return
        name, folder = json.loads(line)
        os.chdir(folder)
        _limit(Path(name), seconds, memory)
        answers.write(json.dumps(_answer(Path(name), memory)).encode() + b"\n")
        answers.flush()
        _limit(None, 0, memory)


def _limit(path: Path | None, seconds: float, memory: int) -> None:
    """Limit what the process may take for a file. Both timers end it: libraries do not look for signals."""
    size = 0.0
    with contextlib.suppress(OSError):
        size = 0.0 if path is None else path.stat().st_size / 2**20
    seconds += _SECONDS_PER_MIB * size if seconds else 0
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * seconds)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = memory + int(_BYTES_PER_BYTE * size * 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _answer(path: Path, memory: int) -> dict[str, Any]:
    try:
        read = read_here(path)
    except tuple(ERRORS.values()) as error:
        return {"error": next(name for name, kind in ERRORS.items() if type(error) is kind), "message": str(error)}
    except MemoryError:
        message = f"cannot read {str(path)!r}: it takes more than {memory / 2**30:g} GiB of memory; leave the file out"
        return {"error": "RetrievalError", "message": message}
    blocks = [(b.kind, b.start, b.end, b.headings, b.header_end, b.section) for b in read.blocks]
    return {
        "text": read.text, "title": read.title, "pages": read.pages, "blocks": blocks, "metadata": dict(read.metadata),
        "encoding_note": read.encoding_note, "losses": read.losses,
    }  # fmt: skip
