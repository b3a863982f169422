"""The socket of the service, and what is checked before anything is loaded: TLS files, the port, keys for others."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from pathlib import Path

from rag_posfix.errors import ConfigError
from rag_posfix.settings import ServiceSettings
from rag_posfix_api.keys.store import KeyStore


def listen(service: ServiceSettings, host: str | None = None, port: int | None = None) -> socket.socket:
    """Return the listening socket of a service that only those who should can use.

    Args:
        host: Address to listen on, instead of ``service.host``.
        port: Port to listen on, instead of ``service.port``; 0 takes a free one.

    Raises:
        ConfigError: the port is in use, the address or the files for TLS cannot be used, or other machines could use
            the service without a key.
    """
    check_tls(service.tls_cert, service.tls_key)
    listener = bind(service.host if host is None else host, service.port if port is None else port)
    address = listener.getsockname()[0]
    if is_loopback(address) or service.allow_anonymous or needs_key(service):
        return listener
    listener.close()
    raise ConfigError(
        f"{address} can be reached from other machines, and there is no API key; create one with: rag-posfix "
        "keys create TENANT (or set RAG_POSFIX_SERVICE_API_KEY), listen on 127.0.0.1, or set "
        "RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS=true to serve everyone who reaches the port"
    )


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def needs_key(service: ServiceSettings) -> bool:
    """Return whether requests need a key: one is in the settings or was ever created, or the settings say so."""
    return service.require_key or service.api_key is not None or KeyStore(service.data_dir).has_keys


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. It is created first, so that a taken port is reported before a model is loaded.

    Args:
        port: Port; 0 takes a free one.

    Raises:
        ConfigError: the port is in use, or the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} cannot be resolved; give an address of this machine with --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with --port")
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} on {host} needs privileges; choose one above 1023 with --port")
    return ConfigError(f"{host}:{port} cannot be listened on: {error.strerror}; choose another with --host and --port")


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise unless both files are absent, or both are there, readable and belong together. The protocol is uvicorn's.

    Args:
        cert: The certificate and its issuers' certificates, in PEM format.
        key: Its private key in PEM format, without a passphrase.

    Raises:
        ConfigError: one is missing, cannot be read, is not in PEM format, needs a passphrase, or is of another pair.
    """
    if cert is None and key is None:
        return
    if cert is None or key is None:
        present, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{present} is given and {missing} is not; TLS needs both files")
    for name, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {error.strerror}; give a file in PEM format") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # no prompt for a passphrase on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used ({reason}): they must be a certificate and its own "
            "key, in PEM format, the key without a passphrase"
        ) from error
