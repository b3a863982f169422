"""The collections of all tenants: a folder for each tenant, and in it a folder for each collection."""

from __future__ import annotations

import re
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from rag_posfix.durable_files import flush
from rag_posfix.errors import RagPosfixError, RetrievalError
from rag_posfix.parameters import shown
from rag_posfix.retrieval.embeddings import embedding_identity
from rag_posfix.retrieval.index.folder_lock import partial_folder
from rag_posfix_api.collections.collection import Collection, collection_lock
from rag_posfix_api.collections.header import Header, header_signature, log_of, read_header, write_header
from rag_posfix_api.http.errors import ConflictError, InvalidRequestError, NotFoundError, StorageError, TooLargeError

NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9_-]{0,63}$"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_NO_TENANT = "_"
"""The folder of callers without a tenant; no tenant has this name."""
_MOST_OPEN = 64


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """What a list says of a collection.

    Attributes:
        name: Its name.
        created_at: Seconds since 1970.
        documents: Number of documents, as the last change noted it.
    """

    name: str
    created_at: int
    documents: int


class Collections:
    """The collections below a folder. Safe for several threads and processes.

    Args:
        folder: Need not exist.
        max_collections: Maximum number of collections of a tenant.
        max_documents: Maximum number of documents of a collection.
    """

    def __init__(self, folder: Path, max_collections: int, max_documents: int) -> None:
        self._folder = folder
        self._max_collections = max_collections
        self._max_documents = max_documents
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], Collection] = OrderedDict()

    def create(self, tenant: str, name: str, embeddings: Embeddings) -> CollectionInfo:
        """Create an empty collection.

        Raises:
            InvalidRequestError: the name is not allowed.
            ConflictError: the tenant has a collection with this name.
            TooLargeError: the tenant has too many collections.
            StorageError: it could not be written.
        """
        folder = self._folder_of(tenant, name)
        header = Header(uid=uuid.uuid4().hex, created_at=int(time.time()), embedding=embedding_identity(embeddings))
        try:
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with collection_lock(folder.parent), collection_lock(folder):
                if header_signature(folder) is not None:
                    raise ConflictError(f"there is a collection {name!r}; choose another name", param="name")
                if len(self.of(tenant)) >= self._max_collections:
                    raise TooLargeError(f"there are {self._max_collections} collections, and no more are allowed")
                folder.mkdir(exist_ok=True, mode=0o700)
                log_of(folder, header).create()
                write_header(folder, header)
                flush(folder.parent)
                flush(folder.parent.parent)
        except OSError as error:
            raise StorageError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
        return CollectionInfo(name, header.created_at, 0)

    def of(self, tenant: str) -> list[CollectionInfo]:
        """Return the collections of a tenant, by name. Damaged ones are left out."""
        found = []
        with suppress(FileNotFoundError):
            for folder in sorted(self._tenant_folder(tenant).iterdir()):
                if _NAME.fullmatch(folder.name) and header_signature(folder) is not None:
                    with suppress(RetrievalError):
                        found.append(_info(folder))
        return found

    def info(self, tenant: str, name: str) -> CollectionInfo:
        """Return what a list says of one collection.

        Raises:
            NotFoundError: the tenant has none of this name.
        """
        folder = self._existing(tenant, name)
        return _info(folder)

    def get(
        self, tenant: str, name: str, embeddings: Embeddings, removed: Callable[[Sequence[Document]], None]
    ) -> Collection:
        """Return a collection.

        Args:
            removed: Is called with documents that are deleted or replaced; that of the first call counts.

        Raises:
            NotFoundError: the tenant has none of this name.
        """
        folder = self._existing(tenant, name)
        with self._lock:
            place = (tenant, name)
            if place not in self._open:
                self._open[place] = Collection(folder, embeddings, self._max_documents, removed)
            self._open.move_to_end(place)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return self._open[place]

    def delete(self, tenant: str, name: str, collection: Collection) -> list[Document]:
        """Delete a collection and return the documents that it had, as far as they can be read.

        Raises:
            NotFoundError: the tenant has none of this name.
            StorageError: it could not be deleted.
        """
        folder = self._existing(tenant, name)
        documents: list[Document] = []
        with collection_lock(folder):
            if header_signature(folder) is None:
                raise _not_found(name)
            with suppress(RagPosfixError):
                documents = collection.documents()
            gone = partial_folder(folder, uuid.uuid4().hex[:12])
            try:
                folder.rename(gone)
                flush(folder.parent)
            except OSError as error:
                raise StorageError(f"cannot delete {str(folder)!r}: {error.strerror or error}") from error
            shutil.rmtree(gone, ignore_errors=True)  # the next writer removes what is left
        with self._lock:
            self._open.pop((tenant, name), None)
        return documents

    def _existing(self, tenant: str, name: str) -> Path:
        folder = self._folder_of(tenant, name)
        if header_signature(folder) is None:
            raise _not_found(name)
        return folder

    def _tenant_folder(self, tenant: str) -> Path:
        if tenant and _NAME.fullmatch(tenant) is None:
            raise InvalidRequestError(f"tenant {shown(tenant)} cannot have collections")
        return self._folder / (tenant or _NO_TENANT)

    def _folder_of(self, tenant: str, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise InvalidRequestError(
                f"collection {shown(name)} must be named with 1 to 64 characters of a-z, 0-9, '-' and '_', the first "
                "a letter or digit",
                param="name",
            )
        return self._tenant_folder(tenant) / name


def _not_found(name: str) -> NotFoundError:
    return NotFoundError(f"there is no collection {name!r}; create it first", param="name")


def _info(folder: Path) -> CollectionInfo:
    count = 0
    with suppress(OSError, ValueError):
        count = int((folder / "count").read_text(encoding="ascii"))
    return CollectionInfo(folder.name, read_header(folder).created_at, count)
