"""Records: a head with settings and summary, and rows with every observation. Written once, never changed.

A record is two files in one folder. ``NAME.json`` is the head, with settings, versions and summary. ``NAME.jsonl.gz``
has the rows, one JSON object per line. ``rows`` in the head has the name of that file, the number of rows, and the
SHA-256 of its uncompressed bytes. Tables are made from heads alone.

Journals: append-only files of answers or rankings, so that an experiment can be interrupted and extended.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import secrets
import subprocess
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import orjson

from rag_posfix.errors import EvaluationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rag_posfix.contracts.generator import Generator

__all__ = ["ExperimentRecord", "Progress", "read_record", "silent"]


T = TypeVar("T")


Progress = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]
"""Called with the name of a step when it begins; returns a context that yields a function of (done, total)."""

_PACKAGES = ("rag-posfix", "torch", "transformers", "sentence-transformers", "langchain-core", "faiss-cpu", "numpy")


def silent(_step: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Report nothing."""
    return nullcontext(lambda done, total: None)


def counted(items: Sequence[T], report: Callable[[int, int], None] | None) -> Iterator[T]:
    """Yield items, and report after each how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        if report is not None:
            report(done, len(items))


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
        summary: Mapping[str, Any] = self.head["summary"]
        return summary

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
    return {
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor_count": os.cpu_count(),
        "git": source_commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def installed_version(package: str) -> str:
    """Return the version of a package, or ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def source_commit() -> str | None:
    """Return the commit of the source tree, with ``-dirty`` if files are modified; None without a repository."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def model_facts(engine: Generator) -> dict[str, Any]:
    """Return the name, dtype and device of the model; dtype and device of a remote model are not known."""
    loaded = getattr(engine, "loaded", None)
    return {
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "dtype": None if loaded is None else str(loaded.model.dtype).removeprefix("torch."),
        "device": "remote" if loaded is None else str(loaded.device),
    }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def writing_results(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the block, which writes to a file or folder of ``--out``, into an ``EvaluationError``."""
    try:
        yield
    except OSError as error:
        raise EvaluationError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file and its folder, with the permissions of the umask; after an error an old file is still there."""
    scratch = path.parent / f".{path.name}-{secrets.token_hex(8)}"
    with writing_results(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with scratch.open("xb") as file:
                file.writelines(chunks)
            os.replace(scratch, path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def write_record(
    folder: Path, name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write a record to new files ``NAME-TIME.json`` and, if it has rows, ``NAME-TIME.jsonl.gz``; return the first."""
    path = folder / f"{name}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}.json"
    save_record(path, head, rows)
    return path


def save_record(path: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Write a record to the files of this name. Equal rows give equal bytes.

    The head is written last, so that a head always has its rows.

    Args:
        head: All but ``rows``.
        rows: None for a record without rows.
    """
    files: dict[Path, bytes] = {}
    content = dict(head)
    if rows is not None:
        lines = b"".join(orjson.dumps(row, option=orjson.OPT_NON_STR_KEYS) + b"\n" for row in rows)
        rows_path = path.with_suffix(".jsonl.gz")
        compressed = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=compressed, compresslevel=9, mtime=0) as file:
            file.write(lines)  # without name, time and platform, which gzip.compress writes: equal bytes
        files[rows_path] = compressed.getvalue()
        digest = hashlib.sha256(lines).hexdigest()
        content["rows"] = {"file": rows_path.name, "count": len(rows), "sha256": digest}
    files[path] = orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n"
    for written, data in files.items():
        write_whole(written, [data])


def read_head(path: Path) -> dict[str, Any]:
    """Return the head of a record."""
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
    try:
        name, expected = str(rows["file"]), rows["sha256"]
    except (TypeError, KeyError) as error:
        raise EvaluationError(f"{path}: rows must be an object with file, count and sha256") from error
    if Path(name).name != name:
        raise EvaluationError(f"{path}: rows are in {name!r}, must be in a file beside the head")
    rows_path = path.with_name(name)
    try:
        lines = gzip.decompress(rows_path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise EvaluationError(f"{rows_path} cannot be read ({error}); it holds the rows of {path}") from error
    digest = hashlib.sha256(lines).hexdigest()
    if digest != expected:
        raise EvaluationError(
            f"{rows_path} holds other rows than {path.name} was written for (SHA-256 {digest}, expected "
            f"{expected}); restore both files from one run"
        )
    return ExperimentRecord(head, tuple(orjson.loads(line) for line in lines.splitlines()), {"record": path})


Row = TypeVar("Row", bound="DataclassInstance")


class LineJournal(Generic[Row]):
    """Rows by key, in memory and, with a path, in a file with one JSON line per row.

    Lines that cannot be read, such as an incomplete line after an interrupt, are ignored. Of two lines with one key,
    the last one is used.

    Args:
        name: Name of the row's field in its line.
        read: Returns the row of a stored value, or None if the value is not a row. It may raise KeyError, TypeError,
            ValueError or AttributeError for such a value.
        path: The file; it and its folder are created with the first row. None: rows are held in memory only.
        fresh: Ignore the rows of earlier runs, which stay in the file.

    Raises:
        EvaluationError: the file exists and cannot be read.
    """

    def __init__(
        self, name: str, read: Callable[[Any], Row | None], path: Path | None = None, *, fresh: bool = False
    ) -> None:
        self._name = name
        self._read_row = read
        self._path = path
        self._rows: dict[str, Row] = {}
        self._earlier: dict[str, str] = {}  # key -> who wrote it, for lines of earlier runs
        self._used: set[str] = set()
        self._torn = False
        self._writer: dict[str, str | None] | None = None
        if path is not None and path.exists():
            self._load(path, fresh)

    @property
    def sources(self) -> list[str]:
        """Version and commit of the library that computed the reused rows, each once."""
        return sorted(self._used)

    def get(self, key: str) -> Row | None:
        """Return the row with this key, or None."""
        if key in self._earlier:
            self._used.add(self._earlier[key])
        return self._rows.get(key)

    def rows(self) -> dict[str, Row]:
        """Return every row, by key."""
        return dict(self._rows)

    def add(self, key: str, row: Row) -> None:
        """Add a row."""
        self._rows[key] = row
        self._earlier.pop(key, None)
        if self._path is None:
            return
        if self._writer is None:
            self._writer = {"version": installed_version("rag-posfix"), "commit": source_commit()}
        line = orjson.dumps(
            {
                "key": key,
                self._name: asdict(row),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                **self._writer,
            }
        )
        with writing_results(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write((b"\n" if self._torn else b"") + line + b"\n")
        self._torn = False

    def _load(self, path: Path, fresh: bool) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EvaluationError(
                f"cannot read the journal {path}: {error.strerror}; remove it or choose another --out"
            ) from error
        self._torn = bool(data) and not data.endswith(b"\n")
        for line in [] if fresh else data.splitlines():
            try:
                entry = orjson.loads(line)
                key, row = entry["key"], self._read_row(entry[self._name])
                if row is not None and isinstance(key, str):
                    self._rows[key] = row
                    self._earlier[key] = f"{entry.get('version')} {entry.get('commit')}"
            except (KeyError, TypeError, ValueError, AttributeError):  # orjson's own error is a ValueError
                continue
