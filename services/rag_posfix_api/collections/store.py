"""The collections of all tenants: a folder for each tenant, and in it a folder for each collection."""

from __future__ import annotations

import re
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.errors import IndexBusyError, RagPosfixError, RetrievalError
from rag_posfix.files import flush
from rag_posfix.parameters import shown
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.index.documents import DocumentFile
from rag_posfix.retrieval.index.storage import locked, partial_folder
from rag_posfix.retrieval.ingest.passages import PassageSize
from rag_posfix_api.collections.collection import (
    Collection,
    CollectionFailures,
    ExternalStore,
    collection_file,
    existing_file,
    file_names,
    is_collection,
    storage_errors,
)
from rag_posfix_api.http.errors import RequestError

NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_NO_TENANT = "_"
"""The folder of callers without a tenant; no tenant has this name."""
_MAX_OPEN = 64
_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """What a list says of a collection; the time of creation is in seconds since 1970."""

    name: str
    created_at: int
    documents: int


class Collections:
    """The collections below a folder, which need not exist. Safe for several threads and processes.

    Methods raise RequestError if the tenant has no collection of a name, the name is not allowed, or a change could
    not be written.

    Args:
        max_collections: Maximum number of collections of a tenant.
        max_documents: Maximum number of documents of a collection.
        size: Upper limits of a passage; one in tokens counts those of the embedding model.

    Attributes:
        failures: The collections that cannot be written or read.
        external: The external vector store that searches the collections, or None; set before they are used.
    """

    def __init__(
        self, folder: Path, max_collections: int, max_documents: int, size: PassageSize | None = None
    ) -> None:
        self._folder = folder
        self._max_collections = max_collections
        self._max_documents = max_documents
        self._size = size or PassageSize()
        self.failures = CollectionFailures()
        self.external: ExternalStore | None = None
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], Collection] = OrderedDict()

    def create(self, tenant: str, name: str, embeddings: Embeddings) -> CollectionInfo:
        """Create an empty collection.

        Raises:
            RequestError: the tenant has a collection with this name, or too many.
        """
        folder, created_at = self._folder_of(tenant, name), int(time.time())
        # A failure is its client's: there is no collection that fails from then on.
        with self.failures.watch("write", folder, lasting=False), storage_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(folder.parent, wait_seconds=_WAIT_SECONDS), locked(folder, wait_seconds=_WAIT_SECONDS):
                if collection_file(folder) is not None:
                    raise RequestError(
                        f"there is a collection {name!r}; choose another name", param="name", code="already_exists"
                    )
                if len(self._folders(tenant)) >= self._max_collections:
                    raise RequestError(
                        f"there are {self._max_collections} collections, and no more are allowed",
                        code="request_too_large",
                    )
                facts = {"embedding": embedding_identity(embeddings), "created_at": created_at}
                if self.external is not None:
                    facts["store"] = self.external.identity
                _create(folder, {**facts, "count": 0, "next_key": 0})
        return CollectionInfo(name, created_at, 0)

    def of(self, tenant: str) -> list[CollectionInfo]:
        """Return the collections of a tenant, by name. Damaged ones are left out, and counted in ``failures``."""
        collections = []
        for folder in self._folders(tenant):
            with suppress(RagPosfixError):
                collections.append(self._info(folder))
        return collections

    def info(self, tenant: str, name: str) -> CollectionInfo:
        """Return the entry of one collection in a list."""
        return self._info(self._folder_of(tenant, name))

    def get(
        self, tenant: str, name: str, embeddings: Embeddings, removed: Callable[[Sequence[Document]], None]
    ) -> Collection:
        """Return a collection; ``removed`` of the first call is called with deleted and replaced documents."""
        folder = self._folder_of(tenant, name)
        existing_file(folder)
        with self._lock:
            key = (tenant, name)
            if key not in self._open:
                count_tokens = getattr(embeddings, "count_tokens", None)
                size = replace(self._size, count_tokens=count_tokens) if self._size.tokens else self._size
                self._open[key] = Collection(
                    folder, embeddings, self._max_documents, removed, self.failures, size, self.external
                )
            self._open.move_to_end(key)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return self._open[key]

    def delete(self, tenant: str, name: str, collection: Collection) -> list[Document]:
        """Delete a collection and return the documents that it had, as far as they can be read."""
        folder = self._folder_of(tenant, name)
        path = existing_file(folder)
        documents: list[Document] = []
        facts: dict[str, Any] = {}
        with storage_errors(folder), ExitStack() as stack:
            try:
                file = DocumentFile(path, wait_seconds=_WAIT_SECONDS)
                stack.callback(file.close)
                stack.enter_context(file.transaction())  # no writer meanwhile
                facts = file.facts()
            except IndexBusyError:
                raise
            except RetrievalError:
                pass  # a damaged file has no writers
            if collection_file(folder) != path:
                raise FileNotFoundError(folder)
            with suppress(RagPosfixError):
                documents = collection.documents()
            collection.erase(facts)
            removed_folder = partial_folder(folder, uuid.uuid4().hex[:12])
            folder.rename(removed_folder)
            flush(folder.parent)
        shutil.rmtree(
            removed_folder, ignore_errors=True
        )  # the next collection of this name removes the remaining files
        with self._lock:
            self._open.pop((tenant, name), None)
        self.failures.forget(folder)
        return documents

    def _info(self, folder: Path) -> CollectionInfo:
        with self.failures.watch("read", folder), storage_errors(folder, "read"):
            file = DocumentFile(existing_file(folder))
            try:
                facts = file.facts()
            finally:
                file.close()
        return CollectionInfo(folder.name, facts["created_at"], facts.get("documents", facts["count"]))

    def _folders(self, tenant: str) -> list[Path]:
        """Return the folders of a tenant's collections, sorted."""
        folder = self._tenant_folder(tenant)
        with storage_errors(folder, "read"):
            names = sorted(filter(_NAME.fullmatch, file_names(folder)))
        return [folder / name for name in names if is_collection(folder / name)]

    def _tenant_folder(self, tenant: str) -> Path:
        if tenant and _NAME.fullmatch(tenant) is None:
            raise RequestError(f"tenant {shown(tenant)} cannot have collections")
        return self._folder / (tenant or _NO_TENANT)

    def _folder_of(self, tenant: str, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise RequestError(
                f"collection {shown(name)} must be named with 1 to 64 characters of a-z, 0-9, '-' and '_', the first "
                "a letter or digit",
                param="name",
            )
        return self._tenant_folder(tenant) / name


def _create(folder: Path, facts: Mapping[str, Any]) -> None:
    """Make the folder and the file of a new collection; after an error there is neither."""
    folder.mkdir(exist_ok=True, mode=0o700)
    if names := sorted(name for name in file_names(folder) if not name.startswith(".")):
        raise RequestError(
            f"{str(folder)!r} has files and no collection ({names[0]} ...); restore its documents-*.sqlite, or move "
            "the folder away",
            code="not_stored",
        )
    path = folder / f"documents-{uuid.uuid4().hex}.sqlite"
    try:
        DocumentFile.create(path, facts)
        flush(folder.parent)
        flush(folder.parent.parent)
    except BaseException:
        with suppress(OSError):
            for file in (path, path.with_name(f"{path.name}-journal")):
                file.unlink(missing_ok=True)
            folder.rmdir()
        raise
