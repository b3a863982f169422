"""One writer per index folder: a lock file beside it, and what killed writers left behind.

The operating system frees the lock when its process ends, however it ends. The lock file holds the id of the writer.
Readers need no lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rag_posfix.errors import IndexBusyError, RetrievalError, missing_extra


def partial_folder(folder: Path, token: str) -> Path:
    """Return the folder beside an index in which its next state is written."""
    return folder.parent / f".{folder.name}.{token}.partial"


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Be the only writer of an index while the block runs; a thread may enter again.

    Unfinished states of writers that were killed are removed first.

    Args:
        folder: The folder of the index; need not exist.
        wait_seconds: How long to wait for another writer.

    Raises:
        IndexBusyError: another thread or process is writing the index.
        RetrievalError: the lock file cannot be made.
        ConfigError: filelock is not installed.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise missing_extra("filelock", "local") from error
    folder = Path(os.path.realpath(folder))
    file = folder.parent / f".{folder.name}.lock"
    lock = FileLock(file, is_singleton=True)  # the same object for a second entry of this thread
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise IndexBusyError(
            f"the index {str(folder)!r} is being written by another process{_writer(file)}; wait until it ends, or "
            "choose another folder"
        ) from None
    except OSError as error:
        raise RetrievalError(f"cannot write the index {str(folder)!r}: {error.strerror or error}") from error
    try:
        if lock.lock_counter == 1:
            with suppress(OSError):
                file.write_text(str(os.getpid()), encoding="ascii")
            _remove_partial(folder)
        yield
    finally:
        if lock.lock_counter == 1:
            with suppress(OSError):  # Windows cannot remove an open file
                file.unlink()  # before the release: a waiter sees that its file is gone, and makes a new one
        lock.release()


def _writer(file: Path) -> str:
    try:
        number = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
    return f" (process {number})" if number.isdecimal() else ""


def _remove_partial(folder: Path) -> None:
    """Remove what writers left that were killed; whoever writes holds the lock, so nobody needs it."""
    for path in folder.parent.glob(f".{_literal(folder.name)}.*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
