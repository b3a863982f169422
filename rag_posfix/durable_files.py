"""Files that survive a power failure once the call that wrote them has returned."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that replaces a former one at once; after an error the former one is still there.

    Args:
        path: The file; its folder exists.
        mode: Permissions, from which the umask is taken.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    flush(path.parent)
