"""A proxy that ends TLS in front of a server on loopback."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path


class TlsProxy:
    """``with TlsProxy(port, target, certificate, key) as proxy``: TLS on ``port``, plain bytes to ``target``."""

    def __init__(self, port: int, target: int, certificate: Path, key: Path) -> None:
        self.port = port
        self.handshakes = 0
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._open: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> TlsProxy:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        threads = []
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=self._serve, args=(client,)))
            threads[-1].start()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()

    def _serve(self, client: socket.socket) -> None:
        try:
            encrypted = self._context.wrap_socket(client, server_side=True)
        except OSError:  # nobody trusts the certificate
            client.close()
            return
        self.handshakes += 1
        with encrypted, socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open += [encrypted, server]
            back = threading.Thread(target=self._copy, args=(server, encrypted))
            back.start()
            self._copy(encrypted, server)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
