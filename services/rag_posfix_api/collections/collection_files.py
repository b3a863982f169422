"""The file of a collection in its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rag_posfix.errors import RetrievalError

_FILE = re.compile(r"documents-[^.]*\.sqlite")


def collection_file(folder: Path) -> Path | None:
    """Return the file of the collection in ``folder``; None if there is no collection.

    Its name has an id that is new whenever a collection is created, so that a process that has the file open sees that
    the collection was deleted and created again.

    Raises:
        OSError: the folder cannot be listed; whether there is a collection is then unknown.
        RetrievalError: there are several files.
    """
    files = sorted(filter(_FILE.fullmatch, file_names(folder)))
    if len(files) > 1:
        raise RetrievalError(
            f"collection {str(folder)!r} is damaged: it has {len(files)} files, {', '.join(files)}; move away those "
            "that are copies"
        )
    return folder / files[0] if files else None


def is_collection(folder: Path) -> bool:
    """Return whether there is a collection in ``folder``; a folder that cannot be listed counts as one."""
    try:
        return any(_FILE.fullmatch(name) for name in file_names(folder))
    except OSError:
        return True


def file_names(folder: Path) -> list[str]:
    """Return the names in ``folder``, which need not exist. ``Path.glob`` and ``exists`` pass over other errors."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
