"""The default folders of files, and files that survive a power failure once they are written. Reads no settings."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

ANSWERS_FOLDER = "answers"
"""Folder of the disk tier of the answer cache, in the folder of caches."""

PASSAGES_FOLDER = "passages"
"""Folder of the disk tier of the passage KV store, in the folder of caches."""


def default_cache_dir() -> Path:
    """Return the folder for converted weights and cached answers: ``~/.cache/rag_posfix``."""
    return Path.home() / ".cache" / "rag_posfix"


def default_data_dir() -> Path:
    """Return the folder for the API keys and collections of a service: ``~/.local/share/rag_posfix``."""
    return Path.home() / ".local" / "share" / "rag_posfix"


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that replaces a former one at once; after an ``OSError`` the former one is still there."""
    scratch = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    flush(path.parent)
