"""Pipelines without weights, and a real server on a free loopback port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import uvicorn
from fastapi.testclient import TestClient
from langchain_core.documents import Document

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.errors import RerankingError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix.telemetry.build import Telemetry
from rag_posfix_api.app import create_app
from rag_posfix_api.runtime.admission import Admission, Ticket
from rag_posfix_api.server import bind, make_server
from tests.support.clock import Clock
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    import pytest

CHAT = "/v1/chat/completions"
BRIDGE = "The bridge of Arvo was built in 1911. It is made of steel."
HARBOUR = "The harbour froze in 1963. Ships waited for weeks."
QUESTION = "When was the bridge of Arvo built?"
ANSWER = "The bridge of Arvo was built in 1911"

MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"model": "fake", "max_tokens": 20, "messages": MESSAGES},
    "/v2/chat": {"model": "fake", "messages": MESSAGES},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "stream": False},
}
"""The question as a body of every dialect, by path."""


def chat(question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    """A request body."""
    return {"model": "fake", "messages": [{"role": "user", "content": question}], **fields}


def post(url: str, **fields: Any) -> httpx2.Response:
    """Ask the service at ``url`` with one document."""
    return httpx2.post(url + CHAT, json=chat(**{"documents": [BRIDGE], **fields}), timeout=60)


@contextmanager
def leaving(url: str, path: str = CHAT, **fields: Any) -> Iterator[None]:
    """Send a request whose client leaves at the end of the block, without its answer."""
    with connected(url) as connection:
        connection.sendall(request_of(path, fields or chat(documents=[BRIDGE])))
        yield


def connected(url: str) -> socket.socket:
    """Return a connection to the service at ``url``."""
    return socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=60)


def request_of(path: str, fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(fields).encode()
    lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((f"POST {path} HTTP/1.1", *lines, "", "")).encode() + body


def clock_of_requests(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock for the time limits and the waits of requests."""
    clock = Clock()
    monkeypatch.setattr("rag_posfix_api.runtime.admission.time", SimpleNamespace(monotonic=clock))
    return clock


def noticed_leaving(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set when the service has noticed that a client left."""
    noticed, cancel = threading.Event(), Admission.cancel

    def cancel_and_tell(admission: Admission, ticket: Ticket) -> None:
        cancel(admission, ticket)
        noticed.set()

    monkeypatch.setattr(Admission, "cancel", cancel_and_tell)
    return noticed


def in_flight(url: str) -> float:
    """How many requests the service at ``url`` says that it is answering."""
    return gauge(url, "rag_posfix_in_flight_requests")


def gauge(url: str, name: str) -> float:
    """What the service at ``url`` says of a metric without labels."""
    text = httpx2.get(url + "/metrics", timeout=60).text
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


def make_pipeline(generator: FakeGenerator | None = None, window: int = 8192, **parts: Any) -> Pipeline:
    encoder = ToyEncoder()
    generator = generator or FakeGenerator(encoder, window)
    return Pipeline(generator, Assembler(encoder, generator.context_window), **parts)


def limits(**fields: Any) -> ServiceSettings:
    return ServiceSettings(**{"port": 0, **fields})


def client_for(pipeline: Pipeline | None = None, **fields: Any) -> TestClient:
    """A client of an app in this process, with these settings of the service."""
    return TestClient(create_app(Settings(), pipeline or make_pipeline(), limits(**fields)))


class WordReranker:
    """Scores by the share of the question's words."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        asked = set(query.lower().split())
        scored = [
            document.model_copy(
                update={
                    "metadata": {
                        **document.metadata,
                        "relevance_score": len(asked & set(document.page_content.lower().split())) / len(asked),
                    }
                }
            )
            for document in documents
        ]
        return sorted(scored, key=lambda d: -d.metadata["relevance_score"])


class BrokenReranker:
    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> Any:
        raise RerankingError(f"no luck with {query}")


class ListRetriever:
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def retrieve(self, question: str, k: int) -> list[Document]:
        found = [
            Document(page_content=t, id=f"r{i}", metadata={"relevance_score": 1 - i / 10})
            for i, t in enumerate(self.texts)
        ]
        return found[:k]


class DictCache:
    """An answer cache in a dict."""

    def __init__(self) -> None:
        self.entries: dict[str, Mapping[str, Any]] = {}

    def begin(self) -> AbstractContextManager[None]:
        return nullcontext()

    def get(self, key: str) -> Mapping[str, Any] | None:
        return self.entries.get(key)

    def put(self, key: str, value: Mapping[str, Any], document_ids: Sequence[str] = ()) -> None:
        self.entries[key] = value

    def single_flight(self, key: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """It holds nothing open."""


class GatedGenerator(FakeGenerator):
    """Counts steps and waits before each one until the gate is open."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ToyEncoder(), **options)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.closed = threading.Event()
        self.steps = 0
        self.running = 0
        self.most_running = 0

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        self.entered.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if not self.gate.wait(60):
                raise TimeoutError("the test never opened the gate")
            for chunk in super().stream(request):
                self.steps += 1
                yield chunk
        finally:
            self.running -= 1
            self.closed.set()


class EndlessGenerator(GatedGenerator):
    """Streams until it is closed."""

    def step(self) -> None:
        time.sleep(0.005)

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        self.entered.set()
        try:
            while True:
                self.steps += 1
                self.step()
                yield Chunk("word ")
        finally:
            self.closed.set()


class ClockedGenerator(EndlessGenerator):
    """Takes a quarter of a second of ``clock`` for each step."""

    step_seconds = 0.25

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def step(self) -> None:
        self.clock.advance(self.step_seconds)


class GeneratorByTurns(EndlessGenerator):
    """Takes the first step at once and waits for a turn in each further one."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(1)

    def step(self) -> None:
        assert self.turns.acquire(timeout=60)


class FailingGenerator(FakeGenerator):
    """Fails before step ``at``."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__(ToyEncoder())
        self.at = at
        self.error = error

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for step, chunk in enumerate(super().stream(request)):
            if step == self.at:
                raise self.error
            yield chunk


@contextmanager
def serving(pipeline: Pipeline | None, **fields: Any) -> Iterator[str]:
    """Serve on a free port and yield the address."""
    with running(pipeline, **fields) as (url, _):
        yield url


@contextmanager
def running(
    pipeline: Pipeline | None,
    hosts: Collection[str] | None = None,
    telemetry: Telemetry | None = None,
    **fields: Any,
) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve on a free port; yield the address and the server."""
    service = limits(**{"shutdown_timeout_seconds": 5, **fields})
    listener = bind("127.0.0.1", 0)
    server = make_server(Settings(), service, pipeline, hosts=hosts, telemetry=telemetry)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()
