"""Result records: everything needed to tell what a number was measured on. One file per run, never appended to."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rag_posfix.assembly.prompt import PromptTemplate
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.labels import label

if TYPE_CHECKING:
    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.generation.engine import Engine

__all__ = ["environment", "file_digest", "run_record", "source_commit", "write_record"]

_PACKAGES = ("rag-posfix", "torch", "transformers", "sentence-transformers", "langchain-core", "faiss-cpu", "numpy")


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


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def run_record(
    kind: str,
    engine: Engine,
    choices: Sequence[MitigationChoice],
    data: Path,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the record of a run: what ran, on what, with what, and every answer."""
    return {
        "kind": kind,
        **environment(),
        "model": engine.model_id,
        "model_fingerprint": engine.fingerprint,
        "dtype": str(engine.loaded.model.dtype).removeprefix("torch."),
        "device": str(engine.loaded.device),
        "data": {"name": data.name, "sha256": file_digest(data)},
        "template": PromptTemplate().fingerprint(),
        "mitigations": {
            label(choice): {"parameters": choice.parameters, "fingerprint": engine.describe(choice).fingerprint}
            for choice in choices
        },
        "settings": settings,
        "summary": summary,
        "rows": list(rows),
    }


def write_record(folder: Path, kind: str, data: Mapping[str, Any]) -> Path:
    """Write ``data`` as a new JSON file in ``folder`` and return its path.

    Raises:
        EvaluationError: the folder cannot be written.
    """
    content = orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    path = folder / f"{kind}-{stamp}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{kind}-", delete=False) as scratch:
            scratch.write(content)
        Path(scratch.name).replace(path)
    except OSError as error:
        raise EvaluationError(f"cannot write a record to {folder}: {error.strerror}; choose another --out") from error
    return path


def source_commit() -> str | None:
    """Return the commit of the source tree, ``-dirty`` appended where files differ; None outside of a checkout."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=here, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
