"""Records of this benchmark: one JSON file per part, written anew after every row, so that a cut-off run keeps all."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "triton", "flash-attn")


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, machine, device and git commit of this run."""
    found: dict[str, Any] = {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git": _commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "device_name": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"] = properties.name
        found["device_memory_bytes"] = properties.total_memory
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
    return found


def write(folder: Path, name: str, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a record whole or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    unfinished = folder / f".{name}.json"
    unfinished.write_text(json.dumps({**head, "rows": list(rows)}, indent=1) + "\n", "utf-8")
    unfinished.replace(path)
    return path


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """Return the commit of the source tree, ``-dirty`` appended where files differ; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        answer = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
