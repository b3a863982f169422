"""Clients that read nothing: requests sent ahead on a connection, and large responses that nobody reads."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.faults.scenarios import connect, load_row
from benchmarks.faults.service import Connection, Host
from tests.support.serving import in_flight

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
