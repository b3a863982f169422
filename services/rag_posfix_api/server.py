"""Runs the application on a port, until a signal stops it.

The socket of the service, and what is checked before anything is loaded: TLS files, the port, keys for others.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import threading
import time
import webbrowser
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry, start_http_server

from rag_posfix.errors import ConfigError, RagPosfixError
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.process import keep_running_on_hangup
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix.telemetry.build import Telemetry
from rag_posfix_api.app import create_app, error_form
from rag_posfix_api.http.connection import BoundedConnection
from rag_posfix_api.http.metrics import LogFormat, configure_logging
from rag_posfix_api.http.middleware import LOOPBACK_NAMES
from rag_posfix_api.keys.store import KeyStore
from rag_posfix_api.runtime.service import Service


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


_CUT_SECONDS = 5
"""How long requests that were ended at the end of the drain have to send their error."""

_log = logging.getLogger(__name__)


def run(
    settings: Settings,
    host: str | None = None,
    port: int | None = None,
    *,
    service: ServiceSettings | None = None,
    pipeline: Pipeline | None = None,
    log_format: LogFormat | None = None,
    opens_page: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM, and then finish running requests. SIGHUP reloads indexes. Logs to stderr.

    A service that cannot load its model, index or embeddings ends at once, and so does one whose split model lost a
    process: its supervisor sees the exit status.

    Args:
        host: Address to listen on, instead of ``service.host``.
        port: Port to listen on, instead of ``service.port``; 0 takes a free one.
        service: Settings of the service; read from the environment if None.
        log_format: ``json`` or ``text``, instead of ``service.log_format``.
        opens_page: Whether to open the page in a browser once the service is ready.

    Raises:
        ConfigError: the port is in use, the address or the files for TLS cannot be used, or other machines could use
            the service without a key.
        RagPosfixError: the pipeline cannot be loaded, or its model cannot answer any more.
    """
    keep_running_on_hangup()
    limits = service or ServiceSettings()
    with listen(limits, host, port) as listener:
        address, number = listener.getsockname()[:2]
        on_loopback, with_keys = is_loopback(address), needs_key(limits)
        configure_logging(log_format or limits.log_format)
        if not (on_loopback or with_keys):
            _log.warning(
                "no API key is needed (allow_anonymous): everyone who reaches %s may use the service", address
            )
        scheme = "http" if limits.tls_cert is None else "https"
        name = f"[{address}]" if ":" in address else address
        _log.info("listening on %s://%s:%d", scheme, name, number)
        hosts = LOOPBACK_NAMES | {name} if on_loopback and not with_keys else None
        on_ready = partial(_announce, page_address(address, number, scheme), opens_page)
        server = make_server(settings, limits, pipeline, hosts=hosts, on_ready=on_ready)
        with serve_metrics(limits.metrics_address, server.metrics):
            server.run(sockets=[listener])
        _log.info("stopped")
    if server.failure is not None:
        raise server.failure


def _announce(page: str, opens_page: bool) -> None:
    """Log that the service is ready, with the address of its page."""
    _log.info("ready: %s", page)
    if opens_page:
        open_page(page)


class DrainingServer(uvicorn.Server):
    """A server that, after a signal, answers new requests with 503 while the running ones end.

    The first signal starts the drain: ``/readyz`` turns 503, and the port stays open. It ends when no request is
    running, or after ``drain_seconds``; requests that are still running then end with an error. A second signal ends
    the drain at once.

    Args:
        on_ready: Called once, when the service is ready; must be quick.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_seconds: float,
        notice_seconds: float,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._notice_seconds = min(notice_seconds, drain_seconds)
        self._on_ready = on_ready
        self._signalled_at: float | None = None
        self._has_terminal = os.isatty(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and reload the indexes at each SIGHUP from then on."""
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._handle_hangup)

    def _handle_hangup(self) -> None:
        if self._has_terminal and not os.isatty(0):  # it was closed: the signal means what it meant to a terminal
            self.handle_exit(signal.SIGTERM, None)
        else:
            self._service.indexes.reload_soon()

    @property
    def metrics(self) -> CollectorRegistry:
        """The metrics of the service."""
        return self._service.metrics.registry

    @property
    def failure(self) -> RagPosfixError | None:
        """Why the service cannot answer any question any more, or None."""
        return self._service.failure

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the drain, or end it. A signal handler: the work is done by ``on_tick``."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
        elif self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server is to close its port and to end. Called ten times a second."""
        ends = await super().on_tick(counter) or self.failure is not None
        if self._on_ready is not None and self._service.is_ready:
            on_ready, self._on_ready = self._on_ready, None
            on_ready()
        if self._signalled_at is None:
            return ends
        self._service.drain()
        waited = time.monotonic() - self._signalled_at
        drained = self._service.in_flight == 0 and waited >= self._notice_seconds
        if not (ends or drained or waited >= self._drain_seconds):
            return False
        self._service.stop()
        self.config.timeout_graceful_shutdown = _CUT_SECONDS
        return True


def make_server(
    settings: Settings,
    service: ServiceSettings,
    pipeline: Pipeline | None = None,
    *,
    hosts: Collection[str] | None = None,
    telemetry: Telemetry | None = None,
    on_ready: Callable[[], None] | None = None,
) -> DrainingServer:
    """Return the server, which runs on a socket of ``bind``.

    Args:
        hosts: Names in the header ``Host`` that are answered; all if None.
        telemetry: Where traces and metrics go; what the settings and the environment say if None.
        on_ready: Called once, when the service is ready.
    """
    app = create_app(settings, pipeline, service, hosts=hosts, telemetry=telemetry)
    config = uvicorn.Config(
        app,
        http=BoundedConnection.limited(service.read_timeout_seconds, error_form("")),
        log_config=None,
        access_log=False,  # the app writes its own lines, without paths and queries
        server_header=False,
        ws="none",
        ssl_certfile=service.tls_cert,
        ssl_keyfile=service.tls_key,
        timeout_keep_alive=service.keep_alive_seconds,
        timeout_graceful_shutdown=service.shutdown_timeout_seconds,
    )
    return DrainingServer(
        config, app.state.service, service.shutdown_timeout_seconds, service.shutdown_notice_seconds, on_ready
    )


@contextmanager
def serve_metrics(address: str | None, registry: CollectorRegistry) -> Iterator[None]:
    """Serve metrics on an address of their own, without a key, during the block; nowhere if None.

    Raises:
        ConfigError: the address cannot be used.
    """
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"metrics_address={address!r} cannot be listened on ({error}); give another HOST:PORT of this machine"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def page_address(host: str, port: int, scheme: str = "http") -> str:
    """Return the address of the page on this machine; ``host`` may mean "all addresses"."""
    bound = ipaddress.ip_address(host.partition("%")[0])
    if bound.is_unspecified:
        host = "127.0.0.1" if bound.version == 4 else "::1"
    return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"


def open_page(address: str) -> None:
    """Open ``address`` in the default browser, in a thread: some browsers return only when they are closed.

    Without a browser the address is logged.
    """

    def open_or_log() -> None:
        if not webbrowser.open(address):
            _log.warning("no browser was found; open %s in one", address)

    threading.Thread(target=open_or_log, name="open-page", daemon=True).start()
