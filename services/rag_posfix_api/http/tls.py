"""TLS: the files of certificate and key, checked before a model is loaded. The protocol itself is uvicorn's."""

from __future__ import annotations

import ssl
from pathlib import Path

from rag_posfix.errors import ConfigError


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise unless both files are absent, or both are there, readable and belong together.

    Args:
        cert: The certificate and those of its issuers, in PEM format.
        key: Its private key in PEM format, without a passphrase.

    Raises:
        ConfigError: one is missing, cannot be read, is not in PEM format, needs a passphrase, or is of another pair.
    """
    if cert is None and key is None:
        return
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} is given and {missing} is not; TLS needs both files")
    for name, path in (("--tls-cert", cert), ("--tls-key", key)):
        _check_readable(name, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # a passphrase is not asked for on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used ({reason}): they must be a certificate and its own "
            "key, in PEM format, the key without a passphrase"
        ) from error


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; give a file in PEM format") from error
