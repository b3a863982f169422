"""A service without weights in a process of its own, and load whose correct answers are known.

``with Host() as host: url = host.serve(redis=...)``. The service runs in a process of its own, as users run it: its
memory can be measured, its disk limited, and a busy client does not take its interpreter.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from benchmarks.tables import filled
from rag_posfix.caching.answers.tiered import build_answer_cache
from rag_posfix.settings import CacheSettings
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import CHAT, WordReranker, make_pipeline, serving

ROOT = Path(__file__).parents[2]
QUESTIONS = 300

FAULT_COLUMNS = {
    "requests": "requests",
    "failed": "failed",
    "wrong": "wrong",
    "undocumented": "undocumented status",
    "lost": "lost",
    "added_ms": "added, ms",
    "worst_ms": "longest, ms",
    "recovered_s": "recovered after, s",
    "served": "deleted and served",
    "mib_before": "memory before, MiB",
    "mib_most": "at most",
    "mib_after": "after",
    "live_worst_ms": "longest `/livez`, ms",
}


@dataclass(frozen=True)
class Outcome:
    """One request: when it began, how long it took, its status (0 without a response), whether the answer is wrong."""

    began: float
    seconds: float
    status: int
    wrong: bool


def correct_answer(number: int) -> str:
    """Return the one correct answer to question ``number``."""
    return f"Station {number} began in {1000 + number} beside the river"


def body_of(number: int, **fields: object) -> bytes:
    """Return the request of question ``number``; the passage that answers it is one of three, in any order."""
    passages = [f"{correct_answer(other)}. It is still in use." for other in (number, number + 1000, number + 2000)]
    random.Random(number).shuffle(passages)
    question = {"role": "user", "content": f"When did station {number} begin?"}
    return json.dumps({"model": "default", "messages": [question], "documents": passages, **fields}).encode()


def headers_of(key: str = "") -> str:
    """Return the headers of a request with an API key, or without one."""
    return "Content-Type: application/json\r\n" + (f"X-Api-Key: {key}\r\n" if key else "")


class Connection:
    """One connection of HTTP/1.1 that is kept open; the cheapest client there is."""

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        self._address = ("127.0.0.1", urlsplit(url).port)
        self._timeout = timeout
        self._socket: socket.socket | None = None

    def post(self, path: str, body: bytes, headers: str = headers_of()) -> tuple[int, bytes]:
        """Return status and body of the response. A connection that breaks raises OSError, and is opened again."""
        lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        return self.send(lines.encode() + body)

    def send(self, request: bytes) -> tuple[int, bytes]:
        """Send these bytes; return status and body of the response."""
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, timeout=self._timeout)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(request)
            return self._response(self._socket)
        except (OSError, ValueError):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _response(self, connection: socket.socket) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += _receive(connection)
        head, _, content = data.partition(b"\r\n\r\n")
        head = head.lower()
        if b"content-length:" not in head:  # a stream: it ends with an empty chunk
            while not content.endswith(b"0\r\n\r\n"):
                content += _receive(connection)
        else:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            while len(content) < length:
                content += _receive(connection)
        if b"connection: close" in head:
            self.close()
        return int(head.split()[1]), content


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the connection was closed before the response was complete")
    return data


@dataclass
class Load:
    """Connections that ask at a bounded pace until the block ends; one waits ``pause`` seconds between requests.

    Several services are asked in turn; the next one also if a connection breaks or the status is 503, as load
    balancers do.
    """

    urls: Sequence[str]
    connections: int = 4
    pause: float = 0.01
    questions: int = QUESTIONS
    body: Callable[[int], bytes] = body_of
    key: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Send requests during the block."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(seed, stop)) for seed in range(self.connections)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def during(self, seconds: float, least: int = 20) -> list[Outcome]:
        """Return the outcomes of requests from now on: for ``seconds``, and until there are ``least``."""
        began = time.monotonic()
        while True:
            time.sleep(min(seconds, 0.05))
            outcomes = [outcome for outcome in list(self.outcomes) if outcome.began >= began]
            waited = time.monotonic() - began
            if (waited >= seconds and len(outcomes) >= least) or waited > 60 + seconds:
                return outcomes

    def _ask(self, seed: int, stop: threading.Event) -> None:
        chance = random.Random(seed)
        connections = [Connection(url) for url in self.urls]
        headers = headers_of(self.key)
        while not stop.wait(self.pause):
            number = chance.randrange(self.questions)
            body = self.body(number)
            began, status, answer = time.monotonic(), 0, b""
            connections.append(connections.pop(0))
            for connection in connections:
                with suppress(OSError, ValueError):
                    status, answer = connection.post(CHAT, body, headers)
                    if status != 503:  # such as not_ready
                        break
            seconds = time.monotonic() - began
            wrong = status == 200 and text_of(answer) != correct_answer(number)
            self.outcomes.append(Outcome(began, seconds, status, wrong))
        for connection in connections:
            connection.close()


def text_of(body: bytes) -> str:
    """Return the text of a chat completion, whole or streamed."""
    if not body.lstrip().startswith(b"{"):
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return str(json.loads(body)["choices"][0]["message"]["content"])


def summary(outcomes: list[Outcome]) -> dict[str, float]:
    """Return counts and latencies of outcomes."""
    latencies = sorted(1e3 * outcome.seconds for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "failed": sum(outcome.status != 200 for outcome in outcomes),
        "wrong": sum(outcome.wrong for outcome in outcomes),
        "p50_ms": round(statistics.median(latencies), 1),
        "p99_ms": round(latencies[int(0.99 * (len(latencies) - 1))], 1),
    }


def fault_table(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table of faults: a column of each number that any row has; of a list, how many it holds."""
    columns = {name: title for name, title in FAULT_COLUMNS.items() if any(name in row for row in rows.values())}
    cells = [
        {"fault": fault}
        | {name: len(value) if isinstance(value := row.get(name), list) else value for name in columns}
        for fault, row in rows.items()
        if row.keys() & columns
    ]
    return filled({"fault": "{fault}"} | {title: f"{{{name}:}}" for name, title in columns.items()}, cells)


def tier_hits(url: str, tier: str = "redis") -> float:
    """Return how many look-ups of a tier of the answer cache were hits."""
    label = f'rag_posfix_cache_tier_lookups_total{{cache="answers",result="hit",tier="{tier}"}}'
    text = httpx2.get(url + "/metrics", timeout=30).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(label))


class Host:
    """The process. It serves any number of services, each on a port of its own, until the block ends."""

    def __enter__(self) -> Host:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.service"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Memory that glibc keeps for reuse would look like growth.
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate("", timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def serve(
        self,
        folder: Path | None = None,
        limits: dict[str, Any] | None = None,
        *,
        embeddings: bool = False,
        **cache: Any,
    ) -> str:
        """Return the address of one more service, with a disk tier in ``folder`` if there is one.

        With ``embeddings`` its collections can be searched.
        """
        request = {
            "folder": None if folder is None else str(folder), "limits": limits or {}, "cache": cache,
            "embeddings": embeddings,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        url = self._process.stdout.readline().strip()
        if not url:
            raise RuntimeError(
                "the process of the services ended; run `python -m benchmarks.faults.service` to see why"
            )
        return url

    def rss_bytes(self) -> int:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve what each line of stdin asks for, until it ends."""
    with ExitStack() as services:
        for line in sys.stdin:
            request = json.loads(line)
            settings = CacheSettings(**{"memory_entries": 20, "disk_bytes": 0, **request["cache"]})
            cache = build_answer_cache(settings, Path(request["folder"] or "."))
            assert cache is not None
            services.callback(cache.close)
            parts: dict[str, Any] = {"embeddings": LetterEmbeddings()} if request["embeddings"] else {}
            pipeline = make_pipeline(cache=cache, reranker=WordReranker(), **parts)
            print(services.enter_context(serving(pipeline, **request["limits"])), flush=True)


if __name__ == "__main__":
    main()
