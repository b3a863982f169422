"""A folder of entries, one file each, that several processes share. Files appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EntryFile", "EntryFolder"]

_SUFFIX = ".kv"
_INCOMING = "incoming"  # in the same folder: a file can be moved without copying within one file system only
_LEFTOVER_SECONDS = 15 * 60.0  # no write takes that long
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of the folder.

    Attributes:
        path: Where it is.
        n_bytes: Its size.
        used_at: When it was last read, roughly, or written; seconds since 1970.
    """

    path: Path
    n_bytes: int
    used_at: float


class EntryFolder:
    """Reads, writes and lists entries; raises what the system raises.

    An entry is at ``<a>/<b>/<hash of its key>.kv``, where a and b are the first digits of the hash: 256 folders.

    Args:
        path: The folder; made when it is first written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, key: str) -> Path:
        """Return where the entry of ``key`` is. Hashed: a key may be any text."""
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        return self._path / name[0] / name[1] / (name + _SUFFIX)

    def read(self, path: Path, most_bytes: int, buffer: Callable[[int], memoryview]) -> tuple[memoryview, float]:
        """Return what is in a file and when it was used; nothing if it is no file, or larger than ``most_bytes``.

        Args:
            path: The file.
            most_bytes: Its largest size.
            buffer: Returns memory of a size to read into.
        """
        with open(path, "rb", buffering=0, opener=_open) as file:
            info = os.fstat(file.fileno())
            sound = stat.S_ISREG(info.st_mode) and info.st_size <= most_bytes
            data = buffer(info.st_size if sound else 0)
            filled = 0
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
            return data[:filled], info.st_mtime

    def write(self, path: Path, pieces: Sequence[bytes | memoryview], now: float) -> None:
        """Put ``pieces`` into a file one after the other, in place of what it held."""
        incoming = self._path / _INCOMING
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)  # passages are private
        incoming.mkdir(exist_ok=True, mode=0o700)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = incoming / secrets.token_hex(16)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            with open(descriptor, "wb") as file:
                file.writelines(pieces)
            os.utime(temporary, (now, now))
            # Not synchronised: what a power cut tears does not open, and is a miss.
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def touch(self, path: Path, now: float) -> None:
        """Note that a file was used."""
        os.utime(path, (now, now))

    def entries(self) -> Iterator[EntryFile]:
        """Yield every entry, in no order; what disappears meanwhile is left out."""
        for first in _folders(self._path):
            for second in _folders(first):
                for path, info in _files(second):
                    if path.suffix == _SUFFIX:
                        yield EntryFile(path, info.st_size, info.st_mtime)

    def remove_leftovers(self, now: float) -> None:
        """Remove files that a process did not finish writing, once they are old."""
        for path, info in _files(self._path / _INCOMING):
            if abs(now - info.st_mtime) > _LEFTOVER_SECONDS:
                with suppress(OSError):
                    path.unlink()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | _NONBLOCK)  # a pipe in the place of a file must not hang


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
