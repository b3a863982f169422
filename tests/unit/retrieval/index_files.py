"""The data files of an index, and how someone changes them who makes an index to do harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rag_posfix.retrieval.index.storage import describe_file, read_manifest


def data_file(folder: Path, role: str) -> Path:
    return folder / read_manifest(folder).files[role].name


def forge_file(folder: Path, role: str, change: bytes | Callable[[bytes], bytes]) -> None:
    """Replace or change a data file, and make the manifest agree with it."""
    path, manifest = data_file(folder, role), read_manifest(folder)
    path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))
    files = {**manifest.files, role: describe_file(path)}
    (folder / "manifest.json").write_text(manifest.model_copy(update={"files": files}).model_dump_json())
