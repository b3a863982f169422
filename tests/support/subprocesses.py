"""Python processes of their own: scripts, with warnings as errors, and services."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
import urllib.request
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


def wait_until_ready(server: subprocess.Popen, port: str, seconds: float = 120.0) -> None:
    """Return once the service on this port is ready; fail if the process ended or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended before it was ready"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")
