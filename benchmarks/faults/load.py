"""Load whose right answers are known: connections that ask, one after the other, one of several hundred questions."""

from __future__ import annotations

import json
import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2

from tests.support.serving import CHAT

QUESTIONS = 300


@dataclass(frozen=True)
class Outcome:
    """One request: when it began, how long it took, its status (0 without a response), whether the answer is wrong."""

    began: float
    seconds: float
    status: int
    wrong: bool


def right_answer(number: int) -> str:
    """Return the one right answer to question ``number``."""
    return f"Station {number} began in {1000 + number} beside the river"


def body_of(number: int, **fields: object) -> bytes:
    """Return the request of question ``number``; the passage that answers it is one of three, in any order."""
    passages = [f"{right_answer(other)}. It is still in use." for other in (number, number + 1000, number + 2000)]
    random.Random(number).shuffle(passages)
    question = {"role": "user", "content": f"When did station {number} begin?"}
    return json.dumps({"model": "default", "messages": [question], "documents": passages, **fields}).encode()


class Connection:
    """One connection of HTTP/1.1 that is kept open; the cheapest client there is."""

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        self._address = ("127.0.0.1", urlsplit(url).port)
        self._timeout = timeout
        self._socket: socket.socket | None = None

    def post(self, path: str, body: bytes, headers: str = "Content-Type: application/json\r\n") -> tuple[int, bytes]:
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
            data += _received(connection)
        head, _, rest = data.partition(b"\r\n\r\n")
        head = head.lower()
        if b"content-length:" not in head:  # a stream: it ends with an empty chunk
            while not rest.endswith(b"0\r\n\r\n"):
                rest += _received(connection)
        else:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            while len(rest) < length:
                rest += _received(connection)
        if b"connection: close" in head:
            self.close()
        return int(head.split()[1]), rest


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("the connection was closed before the response was complete")
    return data


@dataclass
class Load:
    """Connections that ask at a bounded pace until the block ends.

    Attributes:
        url: The service.
        connections: How many.
        pause: Seconds between two requests of a connection.
        questions: How many different questions.
        outcomes: What happened so far.
    """

    url: str
    connections: int = 4
    pause: float = 0.01
    questions: int = QUESTIONS
    outcomes: list[Outcome] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Load]:
        """Send requests during the block."""
        over = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(seed, over)) for seed in range(self.connections)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def during(self, seconds: float, least: int = 20) -> list[Outcome]:
        """Return what was asked and answered from now on: for so long, and until there are so many."""
        began = time.monotonic()
        while True:
            time.sleep(min(seconds, 0.05))
            found = [one for one in list(self.outcomes) if one.began >= began]
            waited = time.monotonic() - began
            if (waited >= seconds and len(found) >= least) or waited > 60 + seconds:
                return found

    def _ask(self, seed: int, over: threading.Event) -> None:
        chance = random.Random(seed)
        connection = Connection(self.url)
        while not over.wait(self.pause):
            number = chance.randrange(self.questions)
            body = body_of(number)
            began = time.monotonic()
            try:
                status, answer = connection.post(CHAT, body)
            except (OSError, ValueError):
                status, answer = 0, b""
            seconds = time.monotonic() - began
            wrong = status == 200 and text_of(answer) != right_answer(number)
            self.outcomes.append(Outcome(began, seconds, status, wrong))
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
    latencies = sorted(1e3 * one.seconds for one in outcomes)
    return {
        "requests": len(outcomes),
        "failed": sum(one.status != 200 for one in outcomes),
        "wrong": sum(one.wrong for one in outcomes),
        "p50_ms": round(statistics.median(latencies), 1),
        "p99_ms": round(latencies[int(0.99 * (len(latencies) - 1))], 1),
    }


def tier_count(url: str, result: str, tier: str = "redis") -> float:
    """Return how many look-ups of a tier of the answer cache had this result: hit, miss or rest."""
    label = f'rag_posfix_cache_tier_lookups_total{{cache="answers",result="{result}",tier="{tier}"}}'
    text = httpx2.get(url + "/metrics", timeout=30).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(label))
