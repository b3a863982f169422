"""An index folder whose newest version is served: a new version takes the place of the old one at once, or not at all.

A question keeps the version that it began with; the files of an old version are closed with its last question. Knows
neither what searches the index nor who looks for new versions.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from langchain_core.documents import Document

from rag_posfix.contracts.retrieval import Retriever
from rag_posfix.errors import RagPosfixError
from rag_posfix.retrieval.index.storage import IndexManifest, read_manifest, read_one_version
from rag_posfix.text import content_hash

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
"""After this time a version that could not be read is read again, even if no file has changed."""


@dataclass(frozen=True, slots=True)
class IndexVersion:
    """A version of an index that was read completely.

    Attributes:
        retriever: Searches this version.
    """

    retriever: Retriever
    manifest: IndexManifest

    @property
    def name(self) -> str:
        """A hash of the manifest, which has the hashes of all files."""
        return content_hash(self.manifest.model_dump_json())[:12]


class FollowedIndex:
    """A retriever that searches the newest version of an index folder. Safe to share between threads.

    Args:
        load: Reads the folder and returns a retriever; it is called again for each new version.

    Raises:
        RagPosfixError: the folder cannot be read, the errors of ``load``.
    """

    def __init__(self, folder: Path, load: Callable[[], Retriever]) -> None:
        self._folder, self._load = folder, load
        self._lock = threading.Lock()
        self._files = _list_files(folder)
        self._retry_at = math.inf
        self.version = self._read(None)
        """The version that new questions search."""
        self.failure: str | None = None
        """Why the version in the folder is not served, or None if it is."""
        self.failing_since = datetime.now(UTC)
        """When the first failure was since a version could be read."""

    @property
    def current_retriever(self) -> Retriever:
        """The retriever of the version that is served now, which ``contracts.retrieval.current_of`` returns."""
        return self.version.retriever

    def retrieve(self, question: str, k: int) -> list[Document]:
        """Return at most ``k`` documents of the version that is served now."""
        return self.version.retriever.retrieve(question, k)

    def reload(self, *, force: bool = True) -> bool:
        """Serve the version in the folder; return whether it was not served before.

        If it cannot be read, ``failure`` says why, and the version before is served. One thread reads at a time.

        Args:
            force: Also if the files are those of the last call. Otherwise the call then costs one ``stat`` per file.
        """
        with self._lock:
            files = _list_files(self._folder)
            if not force and files == self._files and time.monotonic() < self._retry_at:
                return False
            self._files = files
            before = self.version
            try:
                version = self._read(before)
            except Exception as error:  # whatever it is: the version before can be served
                known = isinstance(error, RagPosfixError)
                self.failing_since = self.failing_since if self.failure else datetime.now(UTC)
                self.failure = str(error) if known else f"{type(error).__name__}: {error}"
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                _log.error(
                    "the new version of index %s is not served, version %s of %d passages is: %s",
                    self._folder, before.name, before.manifest.count, self.failure, exc_info=None if known else error,
                )  # fmt: skip
                return False
            self.failure, self._retry_at = None, math.inf
            if version is before:
                return False
            self.version = version
            _log.info(
                "serving version %s of index %s, %d passages", version.name, self._folder, version.manifest.count
            )
            return True

    def _read(self, served: IndexVersion | None) -> IndexVersion:
        """Return the version in the folder, of which all files were read; ``served`` if it is that."""
        if served is not None and read_manifest(self._folder) == served.manifest:
            return served
        return IndexVersion(*read_one_version(self._folder, self._load))


def _list_files(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, inode, size and time of change of each file; none for a folder that cannot be read now."""
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
