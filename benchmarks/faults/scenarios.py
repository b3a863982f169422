"""Each fault as one row: what was asked before, during and after it, what failed, what was wrong, what it cost.

A fault of a Redis, or of several of them, begins and ends while the service is asked.

Clients that read nothing: requests sent ahead on a connection, and large responses that nobody reads.
"""

from __future__ import annotations

import json
import resource
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.faults.service import (
    QUESTIONS,
    Connection,
    Host,
    Load,
    Outcome,
    body_of,
    headers_of,
    summary,
    tier_hits,
)
from tests.support import faulty_server as faulty
from tests.support.redis_server import RedisServer, form_cluster, node_id
from tests.support.serving import CHAT, in_flight
from tests.support.waiting import wait_until

DOCUMENTED = {200, 400, 401, 404, 413, 422, 429, 500, 503, 504}


@contextmanager
def killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def full(server: RedisServer) -> Iterator[None]:
    """Redis rejects every write with an error, and serves every read."""
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.command("CONFIG", "SET", "maxmemory", "1")
    yield
    server.command("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def garbage(server: RedisServer) -> Iterator[None]:
    """Something else answers at its address."""
    server.kill()
    nonsense = faulty.answers_to_each_request(bytes(range(128, 256)) * 4 + b"\r\n$5\r\nwrong\r\n")
    with faulty.faulty_server(nonsense, server.port):
        yield
    server.start()


@contextmanager
def wrong_password(server: RedisServer) -> Iterator[None]:
    """Its password was changed: open connections end, and no new one may ask."""
    server.command("CONFIG", "SET", "requirepass", "changed")
    server.password = "changed"
    server.command("CLIENT", "KILL", "TYPE", "normal")
    yield
    server.command("CONFIG", "SET", "requirepass", "")
    server.password = None


FAULTS: dict[str, Callable[[RedisServer], AbstractContextManager[None]]] = {
    "killed": killed,
    "paused": paused,
    "full": full,
    "garbage": garbage,
    "wrong password": wrong_password,
}


Deployment = tuple[str, Callable[[], None]]
"""The address of several servers, and a function after which another one of them takes the writes."""


@contextmanager
def sentinel() -> Iterator[Deployment]:
    """A master, its replica, and a Sentinel that promotes the replica."""
    with ExitStack() as servers:
        master = servers.enter_context(RedisServer())
        replica = servers.enter_context(RedisServer(replicaof=f"127.0.0.1 {master.port}"))
        wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), 30)
        watcher = servers.enter_context(RedisServer(sentinel_of=master.port))
        wait_until(lambda: str(replica.port).encode() in watcher.command("SENTINEL", "REPLICAS", "mymaster"), 30)

        def kill() -> None:
            master.kill()
            wait_until(lambda: _leads(replica), 60)

        yield f"redis-sentinel://127.0.0.1:{watcher.port}/mymaster/0", kill


@contextmanager
def one_name() -> Iterator[Deployment]:
    """A master and its replica behind one name. The former master stays up, with its connections, as a replica."""
    with ExitStack() as servers:
        master = servers.enter_context(RedisServer())
        replica = servers.enter_context(RedisServer(replicaof=f"127.0.0.1 {master.port}"))
        wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), 30)
        relay = faulty.NameRelay(master.port)
        url = servers.enter_context(faulty.faulty_server(relay))

        def swap() -> None:
            replica.command("REPLICAOF", "NO", "ONE")
            master.command("REPLICAOF", "127.0.0.1", str(replica.port))
            relay.port = replica.port

        yield url, swap


@contextmanager
def cluster(replicas: int = 1) -> Iterator[Deployment]:
    """Three masters with a third of the keys each, and replicas of as many of them."""
    options: dict[str, Any] = {
        "cluster-enabled": "yes", "cluster-node-timeout": "1000", "cluster-replica-validity-factor": "0",
    }  # fmt: skip
    with ExitStack() as servers:
        nodes = [servers.enter_context(RedisServer(**options)) for _ in range(3 + replicas)]
        first, replica = nodes[0], nodes[3]
        form_cluster(nodes[:3], nodes[3:])
        for master, follower in zip(nodes, nodes[3:], strict=False):
            wait_until(partial(_follows, follower, master), 30)
        wait_until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in nodes), 30)
        linked = b"master_link_status:up"
        wait_until(lambda: all(linked in node.command("INFO", "replication") for node in nodes[3:]), 30)
        time.sleep(1)  # until every node has heard of the replica

        def kill() -> None:
            first.kill()
            wait_until(lambda: _leads(replica), 60)
            wait_until(lambda: b"cluster_state:ok" in replica.command("CLUSTER", "INFO"), 60)

        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes[:3])
        yield f"redis-cluster://{hosts}", kill


def _leads(node: RedisServer) -> bool:
    try:
        return b"role:master" in node.command("INFO", "replication")
    except OSError:  # a server that becomes the master closes its connections
        return False


def _follows(node: RedisServer, master: RedisServer) -> bool:
    return node.command("CLUSTER", "REPLICATE", node_id(master)).startswith(b"+OK")


FAILOVERS: dict[str, Callable[[], AbstractContextManager[Deployment]]] = {
    "failover (Sentinel)": sentinel,
    "failover (one name)": one_name,
    "failover (Cluster)": cluster,
}


def redis_fault(host: Host, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of a fault of one Redis; the load runs for ``seconds`` before, during and after it."""
    with RedisServer() as server:
        url = host.serve(redis_url=server.url)
        return load_row(url, FAULTS[name](server), seconds)


def failover(host: Host, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of a failover: the leader is killed, and another server takes its place."""
    with FAILOVERS[name]() as (redis_url, kill_leader):
        url = host.serve(redis_url=redis_url)

        @contextmanager
        def fault() -> Iterator[None]:
            kill_leader()
            yield

        return load_row(url, fault(), seconds)


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

    row = load_row(url, fault(), seconds, tier="disk")
    return {**row, "lost": sum(not json.loads(answer)["cached"] for answer in _ask_each(url, stored))}


def slow_clients(host: Host, seconds: float, clients: int = 20) -> dict[str, Any]:
    """Return the row of clients that send one byte in a tenth of a second, and of ones that do not read."""
    url = host.serve(limits={"read_timeout_seconds": seconds / 2})
    responses: list[bytes] = []

    @contextmanager
    def fault() -> Iterator[None]:
        with ExitStack() as stack:
            senders = [stack.enter_context(connect(url)) for _ in range(clients)]
            readers = [stack.enter_context(connect(url, receive_bytes=2048)) for _ in range(clients)]
            for number, reader in enumerate(readers):
                reader.sendall(_request(body_of(number, stream=True)))
            for sender in senders:
                sender.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            yield
            for sender in senders:
                sender.settimeout(10)
                responses.append(sender.recv(20))

    row = load_row(url, fault(), seconds, tier=None)
    row["slow_told_408"] = sum(response.startswith(b"HTTP/1.1 408") for response in responses)
    return row


def leaving_clients(host: Host, seconds: float, clients: int = 100) -> dict[str, Any]:
    """Return the row of clients that leave: before, in the middle of and after their request, and in a stream."""
    url = host.serve()

    @contextmanager
    def fault() -> Iterator[None]:
        for number in range(clients):
            request = _request(body_of(number % QUESTIONS, stream=number % 2 == 0, cache=False))
            with connect(url) as connection:
                connection.sendall(request[: (10, len(request) // 2, len(request), len(request))[number % 4]])
                if number % 4 == 3:
                    connection.recv(64)
        yield

    row = load_row(url, fault(), seconds, tier=None)
    wait_until(lambda: in_flight(url) == 0, 30)
    return {**row, "left_open": int(in_flight(url))}


def load_row(
    url: str, fault: AbstractContextManager[None], seconds: float, tier: str | None = "redis", key: str = ""
) -> dict[str, Any]:
    """Ask before, during and after ``fault``; with ``tier``, also until that tier has hits again.

    Args:
        key: The API key of the service, if it has one.
    """
    questions = min(QUESTIONS, max(40, int(50 * seconds)))  # more than the memory tier keeps
    _ask_each(url, range(questions), key)  # the tier below the memory has them all
    with Load([url], questions=questions, key=key).running() as load:
        if tier:  # a pause of the machine can be a failure of Redis, which then rests for a time
            wait_until(lambda: tier_hits(url, tier) > 0, 60)
        before = load.during(seconds)
        hits = tier_hits(url, tier) if tier else 0.0
        started = time.monotonic()
        with fault:
            during = load.during(seconds)
            hits_during = tier_hits(url, tier) if tier else 0.0
            ended = time.monotonic()
        recovered = None
        if tier:
            wait_until(lambda: tier_hits(url, tier) > hits_during, 60)
            recovered = round(time.monotonic() - ended, 2)
        after = load.during(seconds)
    row = {
        "requests": len(load.outcomes),
        "failed": sum(outcome.status != 200 for outcome in load.outcomes),
        "undocumented": sum(outcome.status not in DOCUMENTED for outcome in load.outcomes),
        "wrong": sum(outcome.wrong for outcome in load.outcomes),
        "before": summary(before),
        "during": summary(during),
        "after": summary(after),
        "added_ms": round(_median(during) - _median(before), 1),
        "worst_ms": round(1e3 * max(outcome.seconds for outcome in load.outcomes if outcome.began >= started), 1),
    }
    return row if recovered is None else {**row, "hits_before": hits, "recovered_s": recovered}


def _ask_each(url: str, numbers: Iterable[int], key: str = "") -> list[bytes]:
    with closing(Connection(url)) as connection:
        return [connection.post(CHAT, body_of(number), headers_of(key))[1] for number in numbers]


def _median(outcomes: list[Outcome]) -> float:
    return 1e3 * statistics.median(outcome.seconds for outcome in outcomes)


@contextmanager
def connect(url: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", urlsplit(url).port))
        yield connection


def _request(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
SEARCH = "/v1/collections/notes/search"
CHARACTERS = 49_000
"""Of four bytes, in the metadata of each document."""


@dataclass
class Watch:
    """The memory of the service and the time of ``GET /livez``, sampled in a thread."""

    host: Host
    url: str
    mib: list[float] = field(default_factory=list)
    live_ms: list[float] = field(default_factory=list)
    mib_before: float = 0.0

    @contextmanager
    def running(self, pause: float = 0.05) -> Iterator[Watch]:
        """Sample during the block; the first request, which makes the routes, is before it."""
        connection = Connection(self.url)
        connection.send(LIVE)
        connection.close()
        self.mib_before = self.host.rss_bytes() / 2**20
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop, pause))
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()

    def _sample(self, stop: threading.Event, pause: float) -> None:
        connection = Connection(self.url)
        while not stop.wait(pause):
            began = time.monotonic()
            with suppress(OSError, ValueError):
                connection.send(LIVE)
            self.live_ms.append(1e3 * (time.monotonic() - began))
            self.mib.append(self.host.rss_bytes() / 2**20)
        connection.close()

    def row(self) -> dict[str, float]:
        """Return the memory before, at most and now, and the longest ``GET /livez``."""
        now = self.host.rss_bytes() / 2**20
        found = {"mib_before": self.mib_before, "mib_most": max((*self.mib, now)), "mib_after": now}
        return {name: round(mib, 1) for name, mib in found.items()} | {"live_worst_ms": round(max(self.live_ms), 1)}


def pipelining(host: Host, seconds: float, clients: int = 4, mebibytes: int = 6) -> dict[str, Any]:
    """Return the row of connections that send requests without a key one after another and read no response.

    ``sent_mib`` is what the service took of the ``mebibytes`` of each of them.
    """
    url = host.serve(limits={"api_key": "key"})
    requests = LIVE * (mebibytes * 2**20 // len(LIVE))
    sent = [0] * clients

    def send(number: int) -> None:
        with connect(url, receive_bytes=4096) as connection, suppress(OSError):
            connection.settimeout(seconds)
            while sent[number] < len(requests):
                sent[number] += connection.send(requests[sent[number] : sent[number] + 65536])

    @contextmanager
    def fault() -> Iterator[None]:
        threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join()

    with Watch(host, url).running() as watch:
        row = load_row(url, fault(), seconds, tier=None, key="key")
    return {**row, **watch.row(), "sent_mib": round(sum(sent) / 2**20, 2)}


def unread_searches(
    host: Host, folder: Path, seconds: float, clients: int = 12, documents: int = 160
) -> dict[str, Any]:
    """Return the row of clients that ask for a search response of 7 MB each and do not read it, and of one of 31 MB.

    ``statuses`` are those of the unread responses, ``counted`` the requests in flight meanwhile, and ``too_large`` the
    status of the large response.
    """
    url = host.serve(limits={"data_dir": str(folder)}, embeddings=True)
    _fill(url, documents)
    query = json.dumps({"query": "text", "k": 38}).encode()
    lines = (f"POST {SEARCH} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(query)}")
    request = "\r\n".join((*lines, "", "")).encode() + query
    found: dict[str, Any] = {}

    @contextmanager
    def fault() -> Iterator[None]:
        with ExitStack() as stack:
            readers = [stack.enter_context(connect(url, receive_bytes=4096)) for _ in range(clients)]
            for reader in readers:
                reader.settimeout(60)
                reader.sendall(request)
            found["statuses"] = Counter(reader.recv(12).decode()[-3:] for reader in readers)
            found["counted"] = int(in_flight(url))
            large = httpx2.post(url + SEARCH, json={"query": "text", "k": documents}, timeout=60)
            found["too_large"] = large.status_code
            yield

    with Watch(host, url).running() as watch:
        row = load_row(url, fault(), seconds, tier=None)
    return {**row, **watch.row(), **found}


def _fill(url: str, documents: int) -> None:
    """Make the collection ``notes``, with documents whose metadata is long."""
    note = "\N{GRINNING FACE}" * CHARACTERS
    with httpx2.Client(base_url=url, timeout=60) as client:
        client.post("/v1/collections", json={"name": "notes"}).raise_for_status()
        for start in range(0, documents, 20):
            entries = [
                {"id": f"d{number}", "text": "text", "metadata": {"note": note}}
                for number in range(start, min(start + 20, documents))
            ]
            body = json.dumps({"documents": entries}, ensure_ascii=False).encode()
            headers = {"content-type": "application/json"}
            client.post("/v1/collections/notes/documents", content=body, headers=headers).raise_for_status()
