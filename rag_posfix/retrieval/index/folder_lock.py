"""Files next to an index folder while it is written: a lock, unfinished states, and vectors that were computed.

The operating system frees the lock when its process ends, however it ends. Readers need no lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rag_posfix.errors import IndexBusyError, RetrievalError, missing_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCHEMA = """
CREATE TABLE IF NOT EXISTS model (identity TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
"""
_TEXTS_PER_QUERY = 500


def partial_folder(folder: Path, token: str) -> Path:
    """Return the folder next to an index in which its next state is written."""
    return folder.parent / f".{folder.name}.{token}.partial"


@contextmanager
def locked(folder: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Be the only writer of an index while the block runs; a thread may enter again.

    Unfinished states of writers that were killed are removed first. The lock file holds the id of the writer.

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
            leftover = re.compile(
                rf"\.{re.escape(folder.name)}\.[0-9a-f]{{12}}\.partial"
            )  # not of NAME.2024 beside it
            for path in filter(lambda path: leftover.fullmatch(path.name), folder.parent.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
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


class EmbeddedTexts:
    """Vectors that an unfinished update has computed, by a hash of their texts. A ``put`` is durable."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the stored vectors of ``texts``, all of the same dimension; texts without a vector are left out."""
        import numpy as np

        texts_by_key = {_key(text): text for text in texts}
        keys = list(texts_by_key)
        vectors: dict[str, NDArray[np.float32]] = {}
        for start in range(0, len(keys), _TEXTS_PER_QUERY):
            batch = keys[start : start + _TEXTS_PER_QUERY]
            marks = ",".join("?" * len(batch))
            for key, vector in self._connection.execute(
                f"SELECT text, vector FROM vectors WHERE text IN ({marks})", batch
            ):
                vectors[texts_by_key[key]] = np.frombuffer(vector, dtype="<f4").astype(np.float32)
        return vectors if len({len(vector) for vector in vectors.values()}) <= 1 else {}

    def put(self, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Keep the vectors of texts, one row per text."""
        rows = [(_key(text), vector.astype("<f4").tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


@contextmanager
def embedded_texts(folder: Path, identity: str) -> Iterator[EmbeddedTexts | None]:
    """Yield the vectors of an unfinished update; remove them if the block succeeds, keep them if it fails.

    A damaged file, or one of another model, is started anew. Yields None where no file can be kept, for example next
    to a folder that cannot be written. The caller holds the lock of the folder.
    """
    folder = Path(os.path.realpath(folder))
    file = folder.parent / f".{folder.name}.embedded"
    connection = _open_embedded(file, identity)
    if connection is None:
        connection = _open_embedded(file, identity)  # the first call removed it
    if connection is None:
        yield None
        return
    with closing(connection):
        yield EmbeddedTexts(connection)
    _remove_embedded(file)


def _open_embedded(file: Path, identity: str) -> sqlite3.Connection | None:
    """Return an open file of vectors of a model; None after removing it if it is damaged or of another model."""
    connection = None
    try:
        connection = sqlite3.connect(file)
        connection.executescript(_SCHEMA)
        connection.execute("SELECT count(*) FROM vectors WHERE length(vector) % 4 != 0").fetchone()
        with connection:
            connection.execute("INSERT INTO model SELECT ? WHERE NOT EXISTS (SELECT 1 FROM model)", [identity])
        if connection.execute("SELECT identity FROM model").fetchall() == [(identity,)]:
            return connection
    except sqlite3.Error:
        pass
    if connection is not None:
        connection.close()
    with suppress(OSError):
        _remove_embedded(file)
    return None


def _remove_embedded(file: Path) -> None:
    for path in (file, file.with_name(f"{file.name}-journal")):
        path.unlink(missing_ok=True)


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
