"""Each fault as one row: what was asked before, during and after it, what failed, what was wrong, what it cost."""

from __future__ import annotations

import json
import resource
import socket
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.faults.host import Host
from benchmarks.faults.load import QUESTIONS, Connection, Load, Outcome, body_of, summary, tier_count
from benchmarks.faults.redis import FAILOVERS, FAULTS
from tests.support.redis_server import RedisServer
from tests.support.serving import CHAT, in_flight
from tests.support.waiting import wait_until

DOCUMENTED = {200, 400, 401, 404, 413, 422, 429, 500, 503, 504}


def redis_fault(host: Host, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of a fault of one Redis.

    Args:
        name: One of ``FAULTS``.
        seconds: How long the load runs before, during and after the fault.
    """
    with RedisServer() as server:
        url = host.serve(redis_url=server.url)
        return _row(url, FAULTS[name](server), seconds)


def failover(host: Host, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of a failover: the leader is killed, and another server takes its place."""
    with FAILOVERS[name]() as several:
        url = host.serve(redis_url=several.url)

        @contextmanager
        def fault() -> Iterator[None]:
            several.kill_leader()
            yield

        return _row(url, fault(), seconds)


def disk_full(host: Host, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the row of a disk on which no file of the process can grow (``RLIMIT_FSIZE``).

    ``lost`` counts the answers that were stored before and are not found after it.
    """
    url = host.serve(folder, memory_entries=0, disk_bytes=64 * 1024**2)
    stored = range(QUESTIONS, QUESTIONS + 50)
    _ask_each(url, stored)

    @contextmanager
    def fault() -> Iterator[None]:
        before = resource.prlimit(host.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        try:
            yield
        finally:
            resource.prlimit(host.pid, resource.RLIMIT_FSIZE, before)

    row = _row(url, fault(), seconds, tier="disk")
    return {**row, "lost": sum(not json.loads(answer)["cached"] for answer in _ask_each(url, stored))}


def slow_clients(host: Host, seconds: float, clients: int = 20) -> dict[str, Any]:
    """Return the row of clients that send one byte in a tenth of a second, and of ones that do not read."""
    limits = {"read_timeout_seconds": seconds / 2}
    url = host.serve(limits=limits)
    told: list[bytes] = []

    @contextmanager
    def fault() -> Iterator[None]:
        with ExitStack() as opened:
            senders = [opened.enter_context(_connected(url)) for _ in range(clients)]
            readers = [opened.enter_context(_connected(url, receive_bytes=2048)) for _ in range(clients)]
            for number, reader in enumerate(readers):
                reader.sendall(_request(body_of(number, stream=True)))
            for sender in senders:
                sender.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            yield
            for sender in senders:
                sender.settimeout(10)
                told.append(sender.recv(20))

    row = _row(url, fault(), seconds, tier=None)
    row["slow_told_408"] = sum(answer.startswith(b"HTTP/1.1 408") for answer in told)
    return row


def leaving_clients(host: Host, seconds: float, clients: int = 100) -> dict[str, Any]:
    """Return the row of clients that leave: before, in the middle of and after their request, and in a stream."""
    url = host.serve()

    @contextmanager
    def fault() -> Iterator[None]:
        for number in range(clients):
            request = _request(body_of(number % QUESTIONS, stream=number % 2 == 0, cache=False))
            with _connected(url) as connection:
                connection.sendall(request[: (10, len(request) // 2, len(request), len(request))[number % 4]])
                if number % 4 == 3:
                    connection.recv(64)
        yield

    row = _row(url, fault(), seconds, tier=None)
    wait_until(lambda: in_flight(url) == 0, 30)
    return {**row, "left_open": int(in_flight(url))}


def _row(url: str, fault: AbstractContextManager[None], seconds: float, tier: str | None = "redis") -> dict[str, Any]:
    """Ask before, during and after ``fault``; with ``tier``, also until that tier has hits again."""
    questions = min(QUESTIONS, max(40, int(50 * seconds)))  # more than the memory tier keeps
    _ask_each(url, range(questions))  # the tier below it has them all
    with Load(url, questions=questions).running() as load:
        before = load.during(seconds)
        hits = tier_count(url, "hit", tier) if tier else 0.0
        started = time.monotonic()
        with fault:
            during = load.during(seconds)
            hits_during = tier_count(url, "hit", tier) if tier else 0.0
            ended = time.monotonic()
        recovered = None
        if tier:
            wait_until(lambda: tier_count(url, "hit", tier) > hits_during, 60)
            recovered = round(time.monotonic() - ended, 2)
        after = load.during(seconds)
    meanwhile = [one for one in load.outcomes if started <= one.began]
    row = {
        "requests": len(load.outcomes),
        "failed": sum(one.status != 200 for one in load.outcomes),
        "undocumented": sum(one.status not in DOCUMENTED for one in load.outcomes),
        "wrong": sum(one.wrong for one in load.outcomes),
        "before": summary(before),
        "during": summary(during),
        "after": summary(after),
        "added_ms": round(_median(during) - _median(before), 1),
        "worst_ms": round(1e3 * max(one.seconds for one in meanwhile), 1),
    }
    return row if recovered is None else {**row, "hits_before": hits, "recovered_s": recovered}


def _ask_each(url: str, numbers: Iterable[int]) -> list[bytes]:
    with closing(Connection(url)) as connection:
        return [connection.post(CHAT, body_of(number))[1] for number in numbers]


def _median(outcomes: list[Outcome]) -> float:
    return 1e3 * statistics.median(one.seconds for one in outcomes)


@contextmanager
def _connected(url: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", urlsplit(url).port))
        yield connection


def _request(body: bytes) -> bytes:
    lines = (
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body
