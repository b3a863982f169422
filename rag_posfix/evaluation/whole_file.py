"""Files that are written whole or not at all, with the permissions that the user's umask gives."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file, replacing one that is there; after an error the old one is still there.

    Args:
        path: The file; its folder is made.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / f".{path.name}-{secrets.token_hex(8)}"
    try:
        with scratch.open("xb") as opened:
            for piece in pieces:
                opened.write(piece)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
