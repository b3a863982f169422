"""Certificates for tests of TLS."""

from __future__ import annotations

from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization


def make_certificate(folder: Path, name: str = "localhost", passphrase: str = "") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 with that of its own authority, and its key; return both files."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    secret = issued.private_key_pem.bytes()
    if passphrase:
        secret = serialization.load_pem_private_key(secret, None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(passphrase.encode()),
        )
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    cert.write_bytes(issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    key.write_bytes(secret)
    return cert, key
