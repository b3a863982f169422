"""Runs the application on a port, until a signal stops it."""

from __future__ import annotations

import errno
import logging
import socket

import uvicorn

from rag_posfix.errors import ConfigError
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.http.observability import configure_logging

__all__ = ["bind", "make_server", "run"]

_log = logging.getLogger(__name__)


def run(
    settings: Settings,
    host: str | None = None,
    port: int | None = None,
    *,
    service: ServiceSettings | None = None,
    pipeline: Pipeline | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, and then finish running requests. Logs JSON lines to stderr.

    Args:
        settings: The model to load, and defaults of requests.
        host: Address to listen on, instead of ``service.host``.
        port: Port to listen on, instead of ``service.port``; 0 takes a free one.
        service: Settings of the service; read from the environment if None.
        pipeline: The pipeline to serve, instead of loading one.

    Raises:
        ConfigError: the port is in use, or the address cannot be used.
    """
    limits = service or ServiceSettings()
    listener = bind(limits.host if host is None else host, limits.port if port is None else port)
    with listener:
        configure_logging()
        address, number = listener.getsockname()[:2]
        _log.info("listening on http://%s:%d", f"[{address}]" if ":" in address else address, number)
        make_server(settings, limits, pipeline).run(sockets=[listener])


def make_server(settings: Settings, service: ServiceSettings, pipeline: Pipeline | None = None) -> uvicorn.Server:
    """Return the server, which runs on a socket of ``bind``.

    Args:
        settings: The model to load, and defaults of requests.
        service: Settings of the service.
        pipeline: The pipeline to serve, instead of loading one.
    """
    config = uvicorn.Config(
        create_app(settings, pipeline, service),
        log_config=None,
        access_log=False,  # the app writes its own lines, without paths and queries
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=service.shutdown_timeout_seconds,
    )
    return uvicorn.Server(config)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. It is created first, so that a taken port is reported before a model is loaded.

    Args:
        host: Name or address.
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
