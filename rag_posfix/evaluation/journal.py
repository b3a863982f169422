"""Journals: append-only files of answers or rankings, so that an experiment can be interrupted and extended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import orjson

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import installed_version, source_commit, writing_results

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = TypeVar("Row", bound="DataclassInstance")


class LineJournal(Generic[Row]):
    """Rows by key, in memory and, with a path, in a file with one JSON line per row.

    Lines that cannot be read, such as an incomplete line after an interrupt, are ignored. Of two lines with one key,
    the last one is used.

    Args:
        name: Name of the row's field in its line.
        read: Returns the row of a stored value, or None if the value is not a row. It may raise KeyError, TypeError,
            ValueError or AttributeError for such a value.
        path: The file; it and its folder are created with the first row. None: rows are held in memory only.
        fresh: Ignore the rows of earlier runs, which stay in the file.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(
        self, name: str, read: Callable[[Any], Row | None], path: Path | None = None, *, fresh: bool = False
    ) -> None:
        self._name = name
        self._read_row = read
        self._path = path
        self._rows: dict[str, Row] = {}
        self._earlier: dict[str, str] = {}  # key -> who wrote it, for lines of earlier runs
        self._used: set[str] = set()
        self._torn = False
        self._writer: dict[str, str | None] | None = None
        if path is not None and path.exists():
            self._load(path, fresh)

    @property
    def sources(self) -> list[str]:
        """Version and commit of the library that computed the reused rows, each once."""
        return sorted(self._used)

    def get(self, key: str) -> Row | None:
        """Return the row with this key, or None."""
        if key in self._earlier:
            self._used.add(self._earlier[key])
        return self._rows.get(key)

    def rows(self) -> dict[str, Row]:
        """Return every row, by key."""
        return dict(self._rows)

    def add(self, key: str, row: Row) -> None:
        """Add a row."""
        self._rows[key] = row
        self._earlier.pop(key, None)
        if self._path is None:
            return
        if self._writer is None:
            self._writer = {"version": installed_version("rag-posfix"), "commit": source_commit()}
        line = orjson.dumps(
            {
                "key": key,
                self._name: asdict(row),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                **self._writer,
            }
        )
        with writing_results(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write((b"\n" if self._torn else b"") + line + b"\n")
        self._torn = False

    def _load(self, path: Path, fresh: bool) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EvaluationError(
                f"cannot read the journal {path}: {error.strerror}; remove it or choose another --out"
            ) from error
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in [] if fresh else data.splitlines():
            try:
                entry = orjson.loads(line)
                key, row = entry["key"], self._read_row(entry[self._name])
                if row is not None and isinstance(key, str):
                    self._rows[key] = row
                    self._earlier[key] = f"{entry.get('version')} {entry.get('commit')}"
            except (KeyError, TypeError, ValueError, AttributeError):  # orjson's own error is a ValueError
                continue
