"""An index and a collection behind one interface, for tests of what a store on disk guarantees."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from langchain_core.documents import Document

from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix_api.collections.collection import Collection
from rag_posfix_api.collections.store import Collections
from tests.services.opened_collection import texts
from tests.support.letter_embeddings import LetterEmbeddings

Store = Callable[[Path], "IndexStore | CollectionStore"]


class IndexStore:
    """An index folder that every ``put`` loads, changes and saves."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "index"

    def put(self, documents: Mapping[str, str]) -> None:
        """Add texts by id; return when they are on the disk."""
        exists = self.folder.exists()
        store = (
            FaissVectorStore.load(self.folder, LetterEmbeddings()) if exists else FaissVectorStore(LetterEmbeddings())
        )
        store.add_texts(list(documents.values()), ids=list(documents))
        store.save(self.folder)

    def read(self) -> dict[str, str]:
        """Return all texts by id, as another process reads them."""
        documents = FaissVectorStore.load(self.folder, LetterEmbeddings()).documents()
        return {str(document.id): document.page_content for document in documents}


class CollectionStore:
    """A collection of the tenant ``acme``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writer: Collection | None = None
        self.folder = root / "acme" / "notes"
        if not self.folder.exists():
            Collections(root, 10, 100_000).create("acme", "notes", LetterEmbeddings())

    def _collection(self) -> Collection:
        return Collections(self._root, 10, 100_000).get("acme", "notes", LetterEmbeddings(), lambda removed: None)

    def put(self, documents: Mapping[str, str]) -> None:
        """Add texts by id; return when they are on the disk."""
        self._writer = self._writer or self._collection()  # as in a service
        self._writer.put([Document(id=name, page_content=text) for name, text in documents.items()])

    def read(self) -> dict[str, str]:
        """Return all texts by id, as another process reads them."""
        return texts(self._collection())


def damage_file(folder: Path, choose: random.Random) -> None:
    """Flip, overwrite, cut off or remove bytes of a file in a folder, or the file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    # A journal is empty except for its size while nobody writes.
    path = choose.choice(sorted(path for path in files if not path.name.endswith("-journal")))
    data = bytearray(path.read_bytes())
    offset = choose.randrange(len(data))
    kind = choose.choice(["flip", "flip", "overwrite", "zero", "cut", "remove"])
    if kind == "flip":
        data[offset] ^= 1 << choose.randrange(8)
    elif kind == "overwrite":
        data[offset : offset + 8] = choose.randbytes(8)
    elif kind == "zero":
        data[offset : offset + 100] = bytes(len(data[offset : offset + 100]))
    elif kind == "cut":
        del data[offset:]
    path.unlink()
    if kind != "remove":
        path.write_bytes(data)


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: each write then fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_until_killed(make: Store, root: Path, round_number: int, acknowledged: Connection) -> None:
    """Add batches of three documents, and send the number of each batch that is on the disk."""
    store = make(root)
    for batch in range(10_000):
        store.put(batch_of(round_number, batch))
        acknowledged.send(batch)
    time.sleep(600)


def batch_of(round_number: int, batch: int) -> dict[str, str]:
    """Return the documents of one batch."""
    return {f"{round_number}-{batch}-{number}": f"text {round_number} {batch} {number}" for number in range(3)}
