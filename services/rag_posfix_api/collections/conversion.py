"""Finds the file of a collection, and makes it from the files of earlier releases, which are removed afterwards.

They had ``collection.json``, an index of the last checkpoint, and a log of the changes since then.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import RetrievalError
from rag_posfix.retrieval.index.document_file import DocumentFile
from rag_posfix.retrieval.index.documents import IndexEntry
from rag_posfix.retrieval.index.folder_lock import locked
from rag_posfix.retrieval.index.storage import read_index

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 30.0
_HEADER = "collection.json"
_FILE = re.compile(r"documents-[^.]*\.sqlite")


def collection_file(folder: Path) -> Path | None:
    """Return the file of the collection in ``folder``, converted if it is old; None if there is no collection.

    Its name has an id that is new whenever a collection is created, so that a process that has the file open sees that
    the collection was deleted and created again.

    Raises:
        OSError: the folder cannot be listed; whether there is a collection is then unknown.
        RetrievalError: there are several files, or the old files are damaged.
    """
    names = file_names(folder)
    if _HEADER in names:
        with locked(folder, wait_seconds=_WAIT_SECONDS):
            if _HEADER in file_names(folder):
                _convert(folder, folder / _HEADER)
        names = file_names(folder)
    files = sorted(filter(_FILE.fullmatch, names))
    if len(files) > 1:
        raise RetrievalError(
            f"collection {str(folder)!r} is damaged: it has {len(files)} files, {', '.join(files)}; move away those "
            "that are copies"
        )
    return folder / files[0] if files else None


def is_collection(folder: Path) -> bool:
    """Return whether there is a collection in ``folder``, old or new; a folder that cannot be listed counts as one."""
    try:
        return any(name == _HEADER or _FILE.fullmatch(name) for name in file_names(folder))
    except OSError:
        return True


def file_names(folder: Path) -> list[str]:
    """Return the names in ``folder``, which need not exist. ``Path.glob`` and ``exists`` pass over other errors."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _convert(folder: Path, header: Path) -> None:
    try:
        facts = json.loads(header.read_bytes())
        if (facts["format"], facts["version"]) != ("rag-posfix-collection", 1):
            raise ValueError("format")
        uid, embedding, created_at = str(facts["uid"]), str(facts["embedding"]), int(facts["created_at"])
        log = folder / f"log-{int(facts['generation'])}.jsonl"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RetrievalError(f"{str(header)!r} is damaged or of another release") from error
    path = folder / f"documents-{uid}.sqlite"
    if not path.exists():
        rows = _rows(folder / "index", embedding, log)
        _check_count(folder, len(rows))
        new = {"embedding": embedding, "created_at": created_at, "count": len(rows), "next_key": len(rows)}
        DocumentFile.create(path, new, ((key, entry, vector) for key, (entry, vector) in enumerate(rows)))
        _log.info("converted the collection %s to one file", folder)
    # The header goes last: while it exists, an interrupted conversion is repeated.
    shutil.rmtree(folder / "index", ignore_errors=True)
    for old_file in (*folder.glob("log-*.jsonl"), folder / "count", header):
        old_file.unlink(missing_ok=True)


def _check_count(folder: Path, count: int) -> None:
    """Log documents that are missing: of a log that was cut between two changes, every line is sound."""
    try:
        expected = int((folder / "count").read_bytes())  # was written after each change that was acknowledged
    except (OSError, ValueError):
        return
    if count != expected:
        _log.error("collection %s: had %d documents, and %d are in its index and log", folder, expected, count)


def _rows(index: Path, embedding: str, log: Path) -> list[tuple[IndexEntry, bytes]]:
    """Return documents and vectors of an index after the changes of a log, in the order in which they were added."""
    import numpy as np

    rows: dict[str, tuple[IndexEntry, bytes]] = {}
    if index.exists():
        contents = read_index(index, embedding)
        vectors = contents.vectors.reconstruct_batch(np.fromiter(contents.entries, dtype=np.int64))
        for entry, vector in zip(contents.entries.values(), vectors, strict=True):
            rows[str(entry.document.id)] = entry, vector.astype("<f4").tobytes()
    try:
        for change in _changes(log):
            for name in change["ids"] if change["op"] == "delete" else [doc["id"] for doc in change["documents"]]:
                rows.pop(name, None)
            if change["op"] == "put":
                data, size = base64.b64decode(change["vectors"]), 4 * int(change["dimension"])
                for number, fields in enumerate(change["documents"]):
                    document = Document(id=fields["id"], page_content=fields["text"], metadata=fields["metadata"])
                    rows[fields["id"]] = IndexEntry(document), data[number * size : (number + 1) * size]
    except (ValueError, KeyError, TypeError) as error:
        raise RetrievalError(f"the log {str(log)!r} is damaged: {type(error).__name__}") from error
    return list(rows.values())


def _changes(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the changes of a log: lines of a CRC-32 and a JSON object. An incomplete line was never acknowledged."""
    offset = 0
    *lines, _ = log.read_bytes().split(b"\n") if log.exists() else [b""]
    for line in lines:
        checksum, _, text = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise RetrievalError(
                f"the log {str(log)!r} is damaged at byte {offset}; restore it, or remove it from there on"
            )
        yield json.loads(text)
        offset += len(line) + 1
