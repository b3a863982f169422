"""The file ``collection.json``: what a collection is, and which log belongs to its index. Replaced atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rag_posfix.durable_files import replace_durably
from rag_posfix.errors import RetrievalError
from rag_posfix_api.collections.write_ahead_log import WriteAheadLog

_FILE: Final = "collection.json"


class Header(BaseModel):
    """What a collection is.

    Attributes:
        format: Always ``rag-posfix-collection``.
        version: Version of the format.
        uid: Different for a collection that was deleted and created again.
        generation: Counts the checkpoints; the log of another generation is not read.
        created_at: Seconds since 1970.
        embedding: Identity of the embedding model.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["rag-posfix-collection"] = "rag-posfix-collection"
    version: Literal[1] = 1
    uid: str
    generation: int = 0
    created_at: int
    embedding: str


def log_of(folder: Path, header: Header) -> WriteAheadLog:
    """Return the log of the collection in ``folder``."""
    return WriteAheadLog(folder / f"log-{header.generation}.jsonl")


def header_signature(folder: Path) -> tuple[int, int, int] | None:
    """Return what changes when the header is replaced; None if there is no collection in ``folder``."""
    try:
        found = (folder / _FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_header(folder: Path) -> Header:
    """Return the header of the collection in ``folder``.

    Raises:
        RetrievalError: it cannot be read, or is damaged.
    """
    try:
        return Header.model_validate_json((folder / _FILE).read_bytes())
    except OSError as error:
        raise RetrievalError(f"{str(folder / _FILE)!r} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise RetrievalError(f"{str(folder / _FILE)!r} is damaged or of another release") from error


def write_header(folder: Path, header: Header) -> None:
    """Write the header, and flush it to the disk before it replaces the former one."""
    replace_durably(folder / _FILE, header.model_dump_json().encode())
