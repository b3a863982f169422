"""What can happen to a Redis, or to several of them, that a service uses: each begins and ends while it is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support import faulty_server as faulty
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until


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
    """It refuses every write with an error, and serves every read."""
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


@dataclass(frozen=True)
class Deployment:
    """Several servers.

    Attributes:
        url: What a service is given.
        kill_leader: Kills the server that takes the writes; returns once another one does.
    """

    url: str
    kill_leader: Callable[[], None]


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

        yield Deployment(f"redis-sentinel://127.0.0.1:{watcher.port}/mymaster/0", kill)


@contextmanager
def cluster() -> Iterator[Deployment]:
    """Three masters with a third of the keys each, and a replica of the first."""
    options: dict[str, Any] = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "1000",
        "cluster-replica-validity-factor": "0",
    }
    with ExitStack() as servers:
        nodes = [servers.enter_context(RedisServer(**options)) for _ in range(4)]
        first = nodes[0]
        for number, node in enumerate(nodes[:3]):
            slots = range(16384 * number // 3, 16384 * (number + 1) // 3)
            node.command("CLUSTER", "ADDSLOTS", *map(str, slots))
        for node in nodes[1:]:
            first.command("CLUSTER", "MEET", "127.0.0.1", str(node.port))
        wait_until(lambda: all(_knows(node, 4) for node in nodes), 30)
        replica = nodes[3]
        wait_until(lambda: replica.command("CLUSTER", "REPLICATE", _identity(first)).startswith(b"+OK"), 30)
        wait_until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in nodes), 30)
        wait_until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"), 30)
        time.sleep(1)  # until every node has heard of the replica

        def kill() -> None:
            first.kill()
            wait_until(lambda: _leads(replica), 60)
            wait_until(lambda: b"cluster_state:ok" in replica.command("CLUSTER", "INFO"), 60)

        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes[:3])
        yield Deployment(f"redis-cluster://{hosts}", kill)


def _leads(node: RedisServer) -> bool:
    try:
        return b"role:master" in node.command("INFO", "replication")
    except OSError:  # a server that becomes the master closes its connections
        return False


def _knows(node: RedisServer, count: int) -> bool:
    return f"cluster_known_nodes:{count}".encode() in node.command("CLUSTER", "INFO")


def _identity(node: RedisServer) -> str:
    return node.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()


FAILOVERS: dict[str, Callable[[], AbstractContextManager[Deployment]]] = {
    "failover (Sentinel)": sentinel,
    "failover (Cluster)": cluster,
}
