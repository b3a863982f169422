"""A write-ahead log: changes are appended and flushed to the disk before they are acknowledged.

Each line is the CRC-32 of a JSON object in hexadecimal, a space, and the object. What a killed writer left incomplete
at the end was never acknowledged: it is not read, and the next writer cuts it off.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rag_posfix.durable_files import flush
from rag_posfix.errors import RetrievalError


class WriteAheadLog:
    """One log file. Writers hold the lock of its collection; readers need none.

    Args:
        file: The file; need not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def size(self) -> int:
        """Bytes of the file, incomplete lines included; 0 without a file."""
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0

    def create(self) -> None:
        """Make an empty file, and flush that it exists."""
        os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        flush(self._file.parent)

    def remove(self) -> None:
        """Delete the file, if it is there."""
        self._file.unlink(missing_ok=True)

    def append(self, change: Mapping[str, Any], end: int) -> int:
        """Write one change and flush it to the disk; return where the log ends then.

        Args:
            change: The change, of JSON types.
            end: Where the log ends, as ``read`` returned it. What stands behind it is cut off.

        Raises:
            OSError: it could not be written. The log is then as it was.
        """
        text = json.dumps(change, ensure_ascii=False, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, end)
            try:
                _write_at(descriptor, line, end)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
        return end + len(line)

    def read(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """Return the changes behind ``start``, and where the last of them ends.

        Args:
            start: 0, or an end that this method or ``append`` returned.

        Raises:
            RetrievalError: a line is damaged and others follow it.
        """
        try:
            with self._file.open("rb") as handle:
                handle.seek(start)
                data = handle.read()
        except FileNotFoundError:
            return [], start
        changes: list[dict[str, Any]] = []
        *lines, _ = data.split(b"\n")  # the last one is empty or incomplete
        for number, line in enumerate(lines):
            change = _parsed(line)
            if change is None:
                if number + 1 < len(lines):
                    raise RetrievalError(f"the log {str(self._file)!r} is damaged at byte {start}")
                break
            changes.append(change)
            start += len(line) + 1
        return changes, start


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    os.lseek(descriptor, offset, os.SEEK_SET)
    while view:
        view = view[os.write(descriptor, view) :]


def _parsed(line: bytes) -> dict[str, Any] | None:
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        change = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return change if isinstance(change, dict) else None
