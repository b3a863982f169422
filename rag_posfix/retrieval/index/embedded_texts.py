"""Vectors that an unfinished update has computed, in a SQLite file beside the index, until the index is written.

The file holds hashes of texts and vectors, not the texts. A damaged file, or one of another model, is started anew.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCHEMA = """
CREATE TABLE IF NOT EXISTS model (identity TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (text BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID;
"""
_PER_QUERY = 500


class EmbeddedTexts:
    """Vectors by text. Every ``put`` is on the disk when it returns.

    Args:
        connection: An open file with the tables.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, texts: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the vectors of those of ``texts`` that have one; all of the same dimension."""
        import numpy as np

        by_key = {_key(text): text for text in texts}
        keys = list(by_key)
        found: dict[str, NDArray[np.float32]] = {}
        for start in range(0, len(keys), _PER_QUERY):
            part = keys[start : start + _PER_QUERY]
            marks = ",".join("?" * len(part))
            rows = self._connection.execute(f"SELECT text, vector FROM vectors WHERE text IN ({marks})", part)
            found.update((by_key[key], np.frombuffer(vector, dtype="<f4").astype(np.float32)) for key, vector in rows)
        return found if len({len(vector) for vector in found.values()}) <= 1 else {}

    def put(self, texts: Sequence[str], vectors: NDArray[np.float32]) -> None:
        """Keep the vectors of texts.

        Args:
            vectors: One row per text.
        """
        rows = [(_key(text), vector.astype("<f4").tobytes()) for text, vector in zip(texts, vectors, strict=True)]
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?)", rows)


@contextmanager
def embedded_texts(folder: Path, identity: str) -> Iterator[EmbeddedTexts | None]:
    """Yield the kept vectors of an index; remove them if the block succeeds, keep them if it fails.

    Yields None where no file can be kept, for example in a folder that cannot be written.

    Args:
        folder: The folder of the index; the caller holds its lock.
    """
    folder = Path(os.path.realpath(folder))
    file = folder.parent / f".{folder.name}.embedded"
    connection = _opened(file, identity)
    if connection is None:
        yield None
        return
    with closing(connection):
        yield EmbeddedTexts(connection)
    _remove(file)


def _opened(file: Path, identity: str) -> sqlite3.Connection | None:
    for attempt in range(2):
        connection = None
        try:
            connection = sqlite3.connect(file)
            connection.executescript(_SCHEMA)
            found = [row[0] for row in connection.execute("SELECT identity FROM model")]
            connection.execute("SELECT count(*) FROM vectors WHERE length(vector) % 4 != 0").fetchone()
            if found == [identity]:
                return connection
            if not found:
                with connection:
                    connection.execute("INSERT INTO model VALUES (?)", [identity])
                return connection
        except sqlite3.Error:
            if attempt:
                if connection is not None:
                    connection.close()
                return None
        if connection is not None:
            connection.close()
        _remove(file)  # damaged, or of another model
    return None


def _remove(file: Path) -> None:
    for path in (file, file.with_name(f"{file.name}-journal")):
        path.unlink(missing_ok=True)


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
