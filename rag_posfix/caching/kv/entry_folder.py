"""A folder of serialised entries, one file each, that several processes share. Each file is replaced atomically."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SUFFIX = ".kv"
_INCOMING = "incoming"  # for unfinished files; in the same folder, because renaming needs the same file system
_UNFINISHED_SECONDS = 15 * 60.0  # no write takes that long
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class EntryFile:
    """The file of an entry.

    Attributes:
        path: Its path.
        n_bytes: Its size.
        used_at: When it was written or, roughly, last read; seconds since 1970.
    """

    path: Path
    n_bytes: int
    used_at: float


class EntryFolder:
    """Reads, writes and lists entries; raises the OSErrors of the system.

    An entry is at ``<a>/<b>/<hash of its key>.kv``, where a and b are the first hexadecimal digits of the hash.

    Args:
        path: The folder; created when it is first written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, key: str) -> Path:
        """Return the path of the entry of ``key``. The key is hashed, because it can be any text."""
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        return self._path / name[0] / name[1] / (name + _SUFFIX)

    def read(self, path: Path, max_bytes: int, allocate: Callable[[int], memoryview]) -> tuple[memoryview, float]:
        """Return the content of a file and when it was last used.

        Args:
            max_bytes: Its largest size. What is larger, or no regular file, has empty content.
            allocate: Returns memory of a given size to read into.
        """
        with open(path, "rb", buffering=0, opener=_open) as file:
            info = os.fstat(file.fileno())
            readable = stat.S_ISREG(info.st_mode) and info.st_size <= max_bytes
            data = allocate(info.st_size if readable else 0)
            filled = 0
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
            return data[:filled], info.st_mtime

    def write(self, path: Path, parts: Sequence[bytes | memoryview], now: float) -> None:
        """Replace a file by one whose content is ``parts``, one after the other."""
        incoming = self._path / _INCOMING
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)  # passages are private
        incoming.mkdir(exist_ok=True, mode=0o700)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = incoming / secrets.token_hex(16)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            with open(descriptor, "wb") as file:
                file.writelines(parts)
            os.utime(temporary, (now, now))
            # No fsync: a file that a power failure leaves incomplete fails its checksum, and is a miss.
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def touch(self, path: Path, now: float) -> None:
        """Record that a file was used."""
        os.utime(path, (now, now))

    def entries(self) -> Iterator[EntryFile]:
        """Yield every entry, in no order; files that disappear meanwhile are left out."""
        for first in _folders(self._path):
            for second in _folders(first):
                for path, info in _files(second):
                    if path.suffix == _SUFFIX:
                        yield EntryFile(path, info.st_size, info.st_mtime)

    def remove_unfinished(self, now: float) -> None:
        """Remove old files that a process did not finish writing."""
        for path, info in _files(self._path / _INCOMING):
            if abs(now - info.st_mtime) > _UNFINISHED_SECONDS:
                with suppress(OSError):
                    path.unlink()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | _NONBLOCK)  # opening a named pipe in place of a file must not hang


def _folders(path: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as found:
        return [Path(item.path) for item in found if len(item.name) == 1 and item.is_dir(follow_symlinks=False)]
    return []


def _files(path: Path) -> list[tuple[Path, os.stat_result]]:
    files = []
    with suppress(FileNotFoundError), os.scandir(path) as found:
        for item in found:
            with suppress(FileNotFoundError):
                if item.is_file(follow_symlinks=False):
                    files.append((Path(item.path), item.stat(follow_symlinks=False)))
    return files
