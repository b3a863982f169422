"""Runs a script in a Python process of its own, with warnings as errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def run_python(script: str, *arguments: object, cwd: Path | None = None) -> str:
    """Return what ``script`` prints; fail if it fails. Packages in the folder ``cwd`` come before those installed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
