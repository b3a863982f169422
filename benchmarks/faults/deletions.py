"""Answers of deleted documents: how many three processes serve after the deletion.

Each process has an answer cache with memory and Redis. All have every answer when the documents are deleted. Then a
process that was started after the deletion reads them as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.redis import RedisTier
from rag_posfix.caching.tier import MemoryTier
from tests.support.redis_server import RedisServer

_FLUSH_SECONDS = 60.0
_BATCH = 100
_ANSWER = {"text": "Paris is the capital of France. " * 10}


class Process:
    """A process with an answer cache, which obeys lines of JSON."""

    def __init__(self, redis_url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.deletions", redis_url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, action: str, n: int) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process has no pipes")
        stdin.write(json.dumps([action, n]) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())


def after_eviction(n: int) -> dict[str, Any]:
    """Redis is full and has evicted what says which answers a document is in, as ``volatile-lru`` does."""
    options: dict[str, Any] = {"maxmemory-policy": "volatile-lru", "maxmemory-samples": "10"}
    with RedisServer(**options) as server:

        def evict() -> None:
            used = int(_info(server, "used_memory"))
            server.command("CONFIG", "SET", "maxmemory", str(used - 100 * n))

        row = _served(server.url, n, evict)
        left = server.command("EVAL", "return #redis.call('KEYS', 'rag_posfix:answer:*')", "0")
        return {**row, "evicted": int(_info(server, "evicted_keys")), "left_in_redis": int(left[1:])}


def after_failover(n: int) -> dict[str, Any]:
    """The master is killed just before the deletion, which is pending until its replica leads."""
    from benchmarks.faults.scenarios import sentinel

    with sentinel() as (url, kill):
        thread = threading.Thread(target=kill)

        def start_to_kill() -> None:
            thread.start()
            time.sleep(0.2)

        row = _served(url, n, start_to_kill)
        thread.join()
        return row


def _served(url: str, n: int, fault: Callable[[], None]) -> dict[str, Any]:
    with ExitStack() as stack:
        processes = [stack.enter_context(Process(url)) for _ in range(3)]
        processes[0].call("put", n)
        time.sleep(1.1)  # the clock of Redis's eviction has seconds
        before = [process.call("get", n) for process in processes]
        fault()
        with _writing(processes[2], n):
            started = time.monotonic()
            pending = processes[1].call("drop", n)
            confirmed = processes[1].call("flush", n)
            seconds = time.monotonic() - started
        processes.append(stack.enter_context(Process(url)))
        served = [process.call("get", n) for process in processes]
    return {
        "documents": n, "before": before, "pending": pending, "confirmed": confirmed,
        "confirmed_s": round(seconds, 2), "served": sum(served),
    }  # fmt: skip


@contextmanager
def _writing(process: Process, n: int) -> Iterator[None]:
    """Another process reads meanwhile: what it then copies into its memory must not be served either."""
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            process.call("get", n)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _info(server: RedisServer, name: str) -> str:
    lines = server.command("INFO").decode("utf-8", "replace").splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith(f"{name}:"))


def _open(url: str) -> TieredAnswerCache:
    return TieredAnswerCache([MemoryTier(1024**3), RedisTier(url, BlobCodec(), timeout_seconds=1)])


def _obey(url: str) -> None:
    """Do what the lines of the standard input say; the whole of a process."""
    with closing(_open(url)) as cache:
        for line in sys.stdin:
            action, n = json.loads(line)
            result: Any = None
            if action == "put":
                for number in range(n):
                    cache.put(f"answer-{number}", _ANSWER, [f"document-{number}"])
            elif action == "get":
                result = sum(cache.get(f"answer-{number}") is not None for number in range(n))
            elif action == "drop":
                for start in range(0, n, _BATCH):
                    cache.drop_documents([f"document-{number}" for number in range(start, min(n, start + _BATCH))])
                result = cache.pending_deletions
            elif action == "flush":
                result = cache.flush_deletions(_FLUSH_SECONDS)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _obey(sys.argv[1])
