"""The fingerprint of a model: equal for equal files wherever they lie, different when any byte of them differs.

Every byte of the weights is digested, once per file: the digest of a file is remembered in the cache directory with
what ``stat`` says of the file, so that a later start reads no weights. Loads no model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError

_log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf"})
"""Suffixes of files that ``from_pretrained`` takes weights from."""
TOKENIZER_NAMES = frozenset({"tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja"})
"""Files of a tokenizer that are not JSON."""
ADAPTER_WEIGHTS = "adapter_model"
"""Stem of the file that holds the weights of a PEFT adapter."""
REMEMBERED_IN = "weight-digests.json"
"""Name of the file with the remembered digests, in the cache directory."""
FORMAT = 1
"""Of the remembered digests and of the fingerprint; a change of either raises it."""
SETTLED_NS = 2_000_000_000
"""A file that changed this shortly before it was digested may change again within one tick of its file system's clock
and keep its times: its digest is not remembered. Git treats such entries of its index as changed for this reason."""
THREADS = 4


def model_fingerprint(folder: Path, dtype: str, digests: FileDigests, adapters: Sequence[Path] = ()) -> str:
    """Return the identity of a model, 32 hexadecimal digits: weights, configuration, tokenizer, adapters and dtype.

    It depends on the names and the content of files, not on the path of their folder: copies of a model on several
    machines agree. Links are followed.

    Args:
        folder: Holds the model, and possibly an adapter.
        dtype: What the weights are converted to.
        adapters: Folders of adapters that lie elsewhere, in the order in which they are applied.

    Raises:
        ConfigError: a folder holds no weights, or a file cannot be read.

    """
    folders = [(folder, _files_in(folder, "model")), *((each, _files_in(each, "adapter")) for each in adapters)]
    sha256s = iter(digests.of([file for _, files in folders for file in files]))
    content = [FORMAT, dtype, [[[file.name, next(sha256s)] for file in files] for _, files in folders]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


class FileDigests:
    """SHA-256 digests of files, remembered for as long as ``stat`` says that a file is the same.

    A remembered digest is used only if path, size, modification time, change time, inode and device equal the
    digested file's. A file that is rewritten in place, with its size and its modification time restored, still
    has another change time, which no program can set. Not noticed: a change that leaves the change time alone, which
    takes a clock that was set back, writing to the disk past the file system, or Windows, which has no such time.

    The file of remembered digests may be lost, damaged or impossible to write, and several processes may write it at
    the same time: the worst that comes of it is that a file is digested again. Who may write it decides which
    fingerprint a model gets; it is made readable and writable for its owner alone.

    Args:
        path: The file with the remembered digests; None remembers nothing.
        now_ns: The clock of the file system, in nanoseconds since the epoch.
    """

    def __init__(self, path: Path | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns

    def of(self, files: Sequence[Path]) -> list[str]:
        """Return the SHA-256 of each file, as hexadecimal digits; files that are not remembered are read whole."""
        paths = [os.path.realpath(file) for file in files]
        digests = self._recall(paths)
        missing = [path for path in dict.fromkeys(paths) if path not in digests]
        if missing:
            _log.info("taking the digest of %d files", len(missing))
            with ThreadPoolExecutor(THREADS) as pool:
                taken = dict(zip(missing, pool.map(self._digest, missing), strict=True))
            self._remember(taken)
            digests.update({path: entry.sha256 for path, entry in taken.items()})
        return [digests[path] for path in paths]

    def _digest(self, path: str) -> _Taken:
        started = self._now_ns()
        try:
            with open(path, "rb", buffering=0) as file:
                before = _Stamp.of(os.fstat(file.fileno()))
                sha256 = sha256_of(file)
                after = _Stamp.of(os.fstat(file.fileno()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read for the fingerprint of its model: {error.strerror}") from error
        settled = max(before.mtime_ns, before.ctime_ns) < started - SETTLED_NS
        return _Taken(sha256, before if before == after and settled else None)

    def _recall(self, paths: Sequence[str]) -> dict[str, str]:
        remembered, digests = self._read(), {}
        for path in paths:
            entry = remembered.get(path)
            if isinstance(entry, dict) and re.fullmatch("[0-9a-f]{64}", str(entry.get("sha256"))):
                with contextlib.suppress(OSError):  # opening a missing file raises
                    if entry == {**asdict(_Stamp.of(os.stat(path))), "sha256": entry["sha256"]}:
                        digests[path] = entry["sha256"]
        return digests

    def _read(self) -> Mapping[str, Any]:
        if self._path is None:
            return {}
        try:
            content = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        files = content.get("files") if isinstance(content, dict) and content.get("format") == FORMAT else None
        return files if isinstance(files, dict) else {}

    def _remember(self, taken: Mapping[str, _Taken]) -> None:
        """Add to what is remembered, and forget files that are gone. The file is replaced whole."""
        added = {
            path: {**asdict(digest.stamp), "sha256": digest.sha256} for path, digest in taken.items() if digest.stamp
        }
        if self._path is None or not added:
            return
        remembered = {path: entry for path, entry in self._read().items() if os.path.exists(path)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, scratch = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)  # mode 0600
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    json.dump({"format": FORMAT, "files": {**remembered, **added}}, file, indent=1)
                os.replace(scratch, self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(scratch)
                raise
        except OSError as error:
            _log.info("digests are not remembered, each start takes them again: %s: %s", self._path, error.strerror)


def sha256_of(file: FileIO) -> str:
    """Return the SHA-256 of a file that is open for reading. All reads of weights for a fingerprint are in here."""
    return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What ``stat`` says of a file and changes when the file does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _Stamp:
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A digest, and the stamp by which it may be remembered; None if it may not."""

    sha256: str
    stamp: _Stamp | None


def _files_in(folder: Path, of_what: str) -> list[Path]:
    """Return the files that determine the output of a model or an adapter, by name; links are not resolved."""
    try:
        files = sorted(file for file in folder.iterdir() if _is_part_of_model(file) and file.is_file())
    except OSError as error:
        raise ConfigError(f"the folder {folder} of the {of_what} cannot be read: {error.strerror}") from error
    weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES]
    if not any(of_what == "adapter" or file.stem != ADAPTER_WEIGHTS for file in weights):
        raise ConfigError(
            f"the folder {folder} holds no weights of the {of_what}, so its fingerprint cannot be taken; it needs a "
            f"file that ends in one of {', '.join(sorted(WEIGHT_SUFFIXES))}"
        )
    return files


def _is_part_of_model(file: Path) -> bool:
    return file.suffix in WEIGHT_SUFFIXES or file.suffix == ".json" or file.name in TOKENIZER_NAMES
