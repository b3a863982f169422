"""Records: a head with settings and summary, and rows with every observation. Written once, never changed.

A record is two files in one folder. ``NAME.json`` is the head, with settings, versions and summary. ``NAME.jsonl.gz``
has the rows, one JSON object per line. ``rows`` in the head has the name of that file, the number of rows, and the
SHA-256 of its uncompressed bytes. Tables are made from heads alone.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.whole_file import write_whole

if TYPE_CHECKING:
    from rag_posfix.contracts.generator import Generator

__all__ = [
    "ExperimentRecord",
    "environment",
    "file_digest",
    "model_facts",
    "read_head",
    "read_record",
    "save_record",
    "source_commit",
    "write_record",
]

_PACKAGES = ("rag-posfix", "torch", "transformers", "sentence-transformers", "langchain-core", "faiss-cpu", "numpy")


@dataclass(frozen=True, slots=True, eq=False)
class ExperimentRecord:
    """The result of an experiment.

    Attributes:
        head: ``kind``, versions, machine, model, settings and ``summary``.
        rows: One mapping per observation, such as an answer or a ranking.
        files: Written files by their key in ``to_json``; ``record`` is the head.
    """

    head: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the head."""
        found: Mapping[str, Any] = self.head["summary"]
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the summary and the paths of written files: the object of ``--json``."""
        return {**self.summary, **{name: str(path) for name, path in self.files.items()}}

    def write(self, folder: Path | None) -> Self:
        """Return this record with its files, written to ``folder``; None writes nothing.

        Raises:
            EvaluationError: the folder cannot be written.
        """
        if folder is None:
            return self
        path = write_record(folder, str(self.head["kind"]), self.head, self.rows)
        return replace(self, files={**self.files, "record": path})


def environment() -> dict[str, Any]:
    """Return versions, machine and git commit of this run."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {
        "versions": found,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor_count": os.cpu_count(),
        "git": source_commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def model_facts(engine: Generator) -> dict[str, Any]:
    """Return the name, dtype and device of the model; those of a model on a server are not known."""
    loaded = getattr(engine, "loaded", None)
    return {
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "dtype": None if loaded is None else str(loaded.model.dtype).removeprefix("torch."),
        "device": "remote" if loaded is None else str(loaded.device),
    }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_record(
    folder: Path, name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write a record to new files ``NAME-TIME.json`` and, if it has rows, ``NAME-TIME.jsonl.gz``.

    Args:
        folder: The folder; created if missing.
        name: Prefix of the file names.
        head: The head without ``rows``.
        rows: The rows; None for a record without rows.

    Returns:
        The path of the head.

    Raises:
        EvaluationError: the folder cannot be written.
    """
    path = folder / f"{name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}.json"
    save_record(path, head, rows)
    return path


def save_record(path: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Write a record to the files of this name. Equal rows give equal bytes.

    The head is written last, so that a head always has its rows.

    Args:
        path: Of the head, ending in ``.json``.
        head: All but the rows.
        rows: The rows; None for a record that has none.

    Raises:
        EvaluationError: a file cannot be written.
    """
    lines = None if rows is None else [orjson.dumps(row, option=orjson.OPT_NON_STR_KEYS) + b"\n" for row in rows]
    whole = dict(head)
    if lines is not None:
        digest = hashlib.sha256(b"".join(lines)).hexdigest()
        whole["rows"] = {"file": _rows_path(path).name, "count": len(lines), "sha256": digest}
    content = orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n"
    if lines is not None:
        _write(_rows_path(path), _compressed(b"".join(lines)))
    _write(path, content)


def read_head(path: Path) -> dict[str, Any]:
    """Return the head of a record.

    Raises:
        EvaluationError: the file is missing or is no JSON object.
    """
    try:
        head = orjson.loads(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}; give the .json file of a record") from error
    except orjson.JSONDecodeError as error:
        raise EvaluationError(f"{path} is not JSON ({error}); give the .json file of a record") from error
    if not isinstance(head, dict):
        raise EvaluationError(f"{path} holds a {type(head).__name__}, must be the JSON object of a record")
    return head


def read_record(path: Path) -> ExperimentRecord:
    """Return a record with its rows, after a check of their digest.

    Args:
        path: The head; the file of the rows must be in the same folder.

    Raises:
        EvaluationError: a file is missing or damaged, or the rows do not have the digest of the head.
    """
    head = read_head(path)
    rows = head.pop("rows", None)
    if rows is None:
        return ExperimentRecord(head, (), {"record": path})
    lines = _read_lines(path, rows).splitlines()
    return ExperimentRecord(head, tuple(orjson.loads(line) for line in lines), {"record": path})


def _read_lines(path: Path, expected: Any) -> bytes:
    """Return the bytes of the rows that a head describes, checked by their digest."""
    try:
        name, digest = str(expected["file"]), expected["sha256"]
    except (TypeError, KeyError) as error:
        raise EvaluationError(f"{path}: rows must be an object with file, count and sha256") from error
    if Path(name).name != name:
        raise EvaluationError(f"{path}: rows are in {name!r}, must be in a file beside the head")
    try:
        lines = gzip.decompress(path.with_name(name).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise EvaluationError(
            f"{path.with_name(name)} cannot be read ({error}); it holds the rows of {path}"
        ) from error
    found = hashlib.sha256(lines).hexdigest()
    if found != digest:
        raise EvaluationError(
            f"{path.with_name(name)} holds other rows than {path.name} was written for (SHA-256 {found}, expected "
            f"{digest}); restore both files from one run"
        )
    return lines


def _rows_path(path: Path) -> Path:
    return path.with_suffix(".jsonl.gz")


def _compressed(content: bytes) -> bytes:
    """Return bytes in gzip's format without name and time, so that equal bytes give equal files."""
    written = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=written, compresslevel=9, mtime=0) as opened:
        opened.write(content)
    return written.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    try:
        write_whole(path, [content])
    except OSError as error:
        raise EvaluationError(
            f"cannot write a record to {path.parent}: {error.strerror}; choose another --out"
        ) from error


def source_commit() -> str | None:
    """Return the commit of the source tree, with ``-dirty`` if files are modified; None without a repository."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=here, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
