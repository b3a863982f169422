"""Certificates that openssl makes, for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "localhost", passphrase: str = "") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, signed by itself, and its key; return both files."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl, which makes the certificate of this test; apt-get install openssl")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [openssl, "req", "-x509", *curve, *locked, "-days", "2", *names, "-out", str(cert), "-keyout", str(key)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key
