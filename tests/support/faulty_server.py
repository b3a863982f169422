"""Servers on loopback that break the Redis protocol in one way each."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def faulty_server(serve: Callable[[socket.socket, threading.Event], None], port: int = 0) -> Iterator[str]:
    """Yield the URL of a server that handles each connection with ``serve`` until the event is set."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.05)

    def handle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(0.05)
            serve(connection, over)

    def accept() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    finally:
        over.set()
        acceptor.join()
        for thread in threads:
            thread.join()
        listener.close()


def never_answers(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def answers_to_each_request(reply: bytes) -> Callable[[socket.socket, threading.Event], None]:
    def serve(connection: socket.socket, over: threading.Event) -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                if not connection.recv(65536):
                    return
                connection.sendall(reply)

    return serve


def dies_in_the_middle_of_the_reply(connection: socket.socket, over: threading.Event) -> None:
    connection.settimeout(60)
    connection.recv(65536)
    connection.sendall(b"$1000\r\nhalf")


def sends_one_byte_at_a_time(connection: socket.socket, over: threading.Event) -> None:
    """Every byte comes within the socket timeout, the reply never ends."""
    connection.settimeout(60)
    connection.recv(65536)
    connection.sendall(b"$100000\r\n")
    while not over.wait(0.005):
        connection.sendall(b"x")


class Relay:
    """Passes requests on to a sound server and its replies back; ``faulty_server`` serves it.

    ``requests`` is what it was sent, ``connections`` counts what was accepted.
    """

    def __init__(self, port: int) -> None:
        self.requests = b""
        self.connections = 0
        self.port = port

    def __call__(self, connection: socket.socket, over: threading.Event) -> None:
        self.connections += 1
        connection.settimeout(60)
        with socket.create_connection(("127.0.0.1", self.port)) as server:
            while not over.is_set():
                for source in select.select([connection, server], [], [], 0.05)[0]:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is connection:
                        self.requests += data
                        server.sendall(data)
                    else:
                        self.reply(connection, data, over)

    def reply(self, connection: socket.socket, data: bytes, over: threading.Event) -> None:
        raise NotImplementedError


class NameRelay(Relay):
    """Passes everything on: the one name of several servers. New connections lead to ``port``, open ones stay."""

    def reply(self, connection: socket.socket, data: bytes, over: threading.Event) -> None:
        connection.sendall(data)


class StallingRelay(Relay):
    """Passes replies on until they had so many bytes.

    From then on it passes on one byte at a time, often enough that no socket timeout ends, until ``resume`` is set.
    ``passed`` counts bytes of replies.
    """

    def __init__(self, port: int, free_bytes: int) -> None:
        super().__init__(port)
        self.resume = threading.Event()
        self.passed = 0
        self._free_bytes = free_bytes

    def reply(self, connection: socket.socket, data: bytes, over: threading.Event) -> None:
        while data:
            free = len(data) if self.resume.is_set() else max(1, self._free_bytes - self.passed)
            connection.sendall(data[:free])
            self.passed += len(data[:free])
            data = data[free:]
            if data:
                self.resume.wait(0.05)


class DelayingRelay(Relay):
    """Passes each reply on ``seconds`` later: a slow network."""

    def __init__(self, port: int, seconds: float) -> None:
        super().__init__(port)
        self.seconds = seconds

    def reply(self, connection: socket.socket, data: bytes, over: threading.Event) -> None:
        over.wait(self.seconds)
        connection.sendall(data)


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the URL of a listener that accepts nothing and whose queue is full: connecting hangs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        try:
            for _ in range(8):
                client = socket.socket()
                client.setblocking(False)
                waiting.append(client)
                with suppress(BlockingIOError):
                    client.connect(listener.getsockname())
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        finally:
            for client in waiting:
                client.close()
