"""Waits for a service that was started as a process of its own."""

from __future__ import annotations

import subprocess
import time
import urllib.request


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
