"""A server on loopback that gives scripted answers to chat completions, sound and broken ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


class Reply:
    """An answer: the parts of its body, and what is changed of the following.

    Attributes:
        status: HTTP status; 0 closes the connection without an answer.
        cut: Promise more bytes than are sent, and close.
        pause_before: Send nothing until the test is over before this part, -1 the status; None does not pause.
        resume: Ends that pause, and the rest is sent.
    """

    status = 200
    content_type = "text/event-stream"
    cut = False
    pause_before: int | None = None
    resume: threading.Event | None = None

    def __init__(self, *body: bytes, headers: dict[str, str] | None = None, **options: Any) -> None:
        self.body = body
        self.headers = headers or {}
        vars(self).update(options)


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def piece(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def streamed(*texts: str, finish: str = "stop", usage: dict[str, Any] | None = USAGE, **options: Any) -> Reply:
    """A sound stream."""
    parts = [event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})]
    parts += [event(piece(text)) for text in texts]
    parts.append(event(piece(finish=finish)))
    if usage is not None:
        parts.append(event({"choices": [], "usage": usage}))
    return Reply(*parts, event(b"[DONE]"), **options)


def whole(text: str, finish: str = "stop", **fields: Any) -> Reply:
    """A sound answer that is not streamed."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return as_json({"choices": [choice], "usage": USAGE, **fields})


def as_json(data: Any, status: int = 200, **options: Any) -> Reply:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Reply(body, status=status, content_type="application/json", **options)


def error(status: int, message: str, **headers: str) -> Reply:
    return as_json({"error": {"message": message, "code": "some_code"}}, status, headers=headers)


Answering = Callable[[dict[str, Any]], Reply]
"""A server whose answer depends on the body of the request."""


def first_passage(body: dict[str, Any]) -> Reply:
    """Answer with the first passage of the prompt, so that the answer depends on the order of the passages."""
    parts = body["messages"][-1]["content"].split("\n\n")
    text = parts[1] if len(parts) > 1 else "no passages"
    return streamed(text) if body["stream"] else whole(text)


def scored_by_length(body: dict[str, Any]) -> Reply:
    """Answer a rerank request: the longer a text, the higher its score; best first, as servers do."""
    scores = [1 - 1 / (1 + len(text)) for text in body["documents"]]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return as_json({"results": [{"index": index, "relevance_score": scores[index]} for index in order]})


def judging(content: str, alternatives: dict[str, float]) -> dict[str, Any]:
    """A chat completion of one token with log-probabilities."""
    top = [{"token": token, "logprob": value} for token, value in alternatives.items()]
    return {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content},
                "finish_reason": "length",
                "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 1},
    }


class Upstream:
    """What a scripted server was sent. Each request gets the next reply; further ones the last.

    Attributes:
        url: Base URL.
        bodies: The JSON bodies of the requests.
        headers: Their headers, in lower case.
        gone: Set when a client closes its connection while the server pauses.
    """

    def __init__(self, replies: Sequence[Reply | Answering]) -> None:
        self.replies = list(replies)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.gone = threading.Event()
        self.over = threading.Event()
        self.url = ""

    @property
    def model(self) -> str:
        """The name of its model in settings."""
        return f"openai:tiny@{self.url}"

    def next_reply(self) -> Reply:
        found = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return found if isinstance(found, Reply) else found(self.bodies[-1])


@contextmanager
def upstream(*replies: Reply | Answering, port: int = 0) -> Iterator[Upstream]:
    """Serve on ``port``, 0 for a free one."""
    script = Upstream(replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            script.bodies.append(json.loads(body))
            script.headers.append({name.lower(): value for name, value in self.headers.items()})
            script.paths.append(self.path)
            with suppress(OSError):
                self._send(script.next_reply())

        def _send(self, reply: Reply) -> None:
            if not reply.status:
                self.close_connection = True
                return
            if reply.pause_before == -1:
                self._wait_for_the_end()
                return
            self.send_response(reply.status)
            for name, value in {"content-type": reply.content_type, **reply.headers}.items():
                self.send_header(name.replace("_", "-"), value)
            length = sum(map(len, reply.body)) + (1000 if reply.cut else 0)
            self.send_header("content-length", str(length))
            self.end_headers()
            for number, part in enumerate(reply.body):
                if number == reply.pause_before:
                    self.wfile.flush()
                    if reply.resume is None:
                        self._wait_for_the_end()
                        return
                    assert reply.resume.wait(60)
                self.wfile.write(part)
            self.wfile.flush()
            self.close_connection = reply.cut

        def _wait_for_the_end(self) -> None:
            """Wait until the client closes the connection, or the test is over."""
            self.close_connection = True
            self.connection.settimeout(0.02)
            while not script.over.is_set():
                with suppress(TimeoutError):
                    if not self.connection.recv(1):
                        script.gone.set()
                        return

        def log_message(self, *_arguments: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        script.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def record_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of the pauses before further attempts, which take no time from now on."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)
    return pauses
