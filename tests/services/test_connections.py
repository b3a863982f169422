"""What holds before a request is parsed, and how the service ends. Real servers: a test client has no connections."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest

from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix_api.http.connection import MAX_HEAD_BYTES, MAX_QUEUED
from rag_posfix_api.http.middleware import LOOPBACK_NAMES
from tests.support.clock import Clock
from tests.support.serving import (
    BRIDGE,
    CHAT,
    ClockedGenerator,
    EndlessGenerator,
    GatedGenerator,
    chat,
    clock_of_requests,
    connected,
    in_flight,
    make_pipeline,
    post,
    request_of,
    running,
    serving,
)
from tests.support.waiting import wait_until


def everything(connection: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            data = connection.recv(65536)
        except ConnectionResetError:  # the server closed with bytes of ours unread
            return found
        if not data:
            return found
        found += data


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 7000 + b"\r\n",
    ],
    ids=["path", "header", "headers"],
)
def test_a_long_head_is_refused_before_the_key_is_looked_at(head: bytes):
    with serving(make_pipeline(), api_key="key") as url, connected(url) as connection:
        connection.sendall(head)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "head_too_large"
        assert str(MAX_HEAD_BYTES) in error["message"]
        assert httpx2.get(url + "/livez", timeout=60).status_code == 200


def test_a_header_without_an_end_is_refused_and_not_kept_in_memory():
    with serving(make_pipeline()) as url, connected(url) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nX: ")
        with pytest.raises(OSError, match=r"reset|[Bb]roken|timed out"):
            connection.sendall(b"x" * 50 * 1024**2)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HT", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes):
    with serving(make_pipeline(), read_timeout_seconds=0.3) as url, connected(url) as connection:
        connection.sendall(sent)
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"0.3 seconds" in answer


LIVE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"


def as_bytes(path: str, body: bytes, *lines: str) -> bytes:
    """A POST with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *lines,
    )
    return "\r\n".join((*head, "", "")).encode() + body


def test_requests_sent_ahead_are_not_parsed_beyond_sixteen_and_all_are_answered_in_order():
    generator = GatedGenerator()
    with running(make_pipeline(generator)) as (url, server), connected(url) as connection:
        question = json.dumps(chat(documents=[BRIDGE])).encode()
        # The last bodies are line ends only, and some heads have more lines than a queue has requests.
        many_lines = b"GET /livez HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 40 + b"\r\n"
        unknown = as_bytes("/unknown", b"\n" * 5000)
        connection.sendall(as_bytes(CHAT, question) + LIVE * 200 + (many_lines + unknown) * 10)
        assert generator.entered.wait(60)
        (protocol,) = (each for each in server.server_state.connections if getattr(each, "pipeline", None))
        for _ in range(3):  # the event loop has read what it reads by then
            assert httpx2.get(url + "/livez", timeout=60).status_code == 200
        assert len(protocol.pipeline) == MAX_QUEUED == 16
        generator.gate.set()
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        statuses = re.findall(rb"HTTP/1.1 (\d+)", everything(connection))
        assert statuses == [b"200"] * 201 + [b"200", b"404"] * 10 + [b"200"]


def test_a_key_in_a_trailer_is_no_key():
    with serving(make_pipeline(), api_key="right") as url:
        for name in ("X-Api-Key: right", "Authorization: Bearer right"):
            with connected(url) as connection:
                head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
                connection.sendall(f"{head}2\r\n{{}}\r\n0\r\n{name}\r\n\r\n".encode())
                assert everything(connection).startswith(b"HTTP/1.1 401 ")


def test_trailers_leave_the_key_of_the_head_as_it_is():
    with serving(make_pipeline(), api_key="right") as url, connected(url) as connection:
        body = json.dumps(chat(documents=[BRIDGE])).encode()
        lines = f"POST {CHAT} HTTP/1.1", "Host: a", "X-Api-Key: right", "Content-Type: application/json"
        head = "\r\n".join((*lines, "Connection: close", "Transfer-Encoding: chunked", "", "")).encode()
        connection.sendall(
            head + b"%x\r\n%b\r\n0\r\nX-Api-Key: wrong\r\nExpect: 100-continue\r\n\r\n" % (len(body), body)
        )
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_count_as_head_bytes():
    with serving(make_pipeline()) as url, connected(url) as connection:
        connection.sendall(b"POST /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        connection.sendall(b"a: b\r\n" * 7000 + b"\r\n")
        assert b"HTTP/1.1 431 " in everything(connection)


def test_a_connection_without_a_request_stays_open_for_keep_alive_seconds():
    with running(make_pipeline(), keep_alive_seconds=90) as (url, server), httpx2.Client(timeout=60) as client:
        assert client.get(url + "/livez").status_code == 200
        assert server.config.timeout_keep_alive == 90
    with running(make_pipeline()) as (_, server):
        assert server.config.timeout_keep_alive == 75


def test_an_answer_may_take_longer_than_its_request():
    generator = GatedGenerator()
    with running(make_pipeline(generator), read_timeout_seconds=60) as (url, server), connected(url) as connection:
        wait_until(lambda: server.server_state.connections)
        server.config.http.read_seconds = 0.2  # from the first byte, which comes with all others
        connection.sendall(request_of(CHAT, chat(documents=[BRIDGE])))
        assert generator.entered.wait(60)
        with connected(url) as silent:
            assert everything(silent).startswith(b"HTTP/1.1 408 "), "as long as a request may take"
        generator.gate.set()
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_on_loopback_without_a_key_other_names_are_refused():
    with running(make_pipeline(), hosts=LOOPBACK_NAMES) as (url, _):
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]:1"):
            response = httpx2.get(url + "/v1/models", headers={"host": host}, timeout=60)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden_host")
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000"):
            assert httpx2.get(url + "/v1/models", headers={"host": host}, timeout=60).status_code == 200
    with serving(make_pipeline()) as url:
        assert httpx2.get(url + "/v1/models", headers={"host": "any.example"}, timeout=60).status_code == 200


def test_after_a_signal_new_requests_are_told_and_running_ones_end():
    generator = GatedGenerator()
    with (
        running(make_pipeline(generator), shutdown_timeout_seconds=60) as (url, server),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(post, url)
        assert generator.entered.wait(60)
        server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: httpx2.get(url + "/readyz", timeout=60).status_code == 503)
        refused = post(url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert refused.headers["retry-after"]
        assert httpx2.get(url + "/livez", timeout=60).status_code == 200
        generator.gate.set()
        assert answer.result().status_code == 200
        wait_until(lambda: not server.servers[0].is_serving())


def test_the_service_stays_for_its_notice_although_nothing_runs(monkeypatch: pytest.MonkeyPatch):
    clock, reads = Clock(), list[float]()

    def read() -> float:
        reads.append(clock())
        return clock()

    monkeypatch.setattr("rag_posfix_api.server.time", SimpleNamespace(monotonic=read))
    with running(make_pipeline(), shutdown_timeout_seconds=1000, shutdown_notice_seconds=600) as (_, server):
        server.handle_exit(signal.SIGTERM, None)
        clock.advance(599.5)
        wait_until(lambda: reads.count(clock()) > 1)  # at two ticks: the first one is over
        assert server.servers[0].is_serving()
        clock.advance(0.5)
        wait_until(lambda: not server.servers[0].is_serving())


def test_a_stream_that_is_cut_at_the_end_gets_an_error_event_and_an_access_line(caplog: pytest.LogCaptureFixture):
    generator = EndlessGenerator()
    with (
        caplog.at_level(logging.INFO, logger="rag_posfix_api.access"),
        running(make_pipeline(generator), shutdown_timeout_seconds=1) as (url, server),
        httpx2.stream("POST", url + CHAT, json=chat(documents=[BRIDGE], stream=True), timeout=60) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.handle_exit(signal.SIGTERM, None)
        *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        wait_until(lambda: any(getattr(r, "fields", {}).get("error") == "stopping" for r in caplog.records))
    assert generator.closed.is_set()


class LargePieces(ClockedGenerator):
    """Streams pieces that fill the buffers of a connection before its time is over."""

    step_seconds = 1 / 64

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        for chunk in super().stream(request):
            yield Chunk(chunk.text * 100_000)


def test_a_client_that_reads_nothing_holds_no_place_beyond_the_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rag_posfix_api.runtime.jobs.READING_SECONDS", 0.5)
    generator = LargePieces(clock_of_requests(monkeypatch))
    with (
        serving(make_pipeline(generator), request_timeout_seconds=0.5, max_concurrent=1) as url,
        connected(url) as connection,
    ):
        connection.sendall(request_of(CHAT, chat(stream=True)))
        assert generator.entered.wait(60)
        wait_until(lambda: in_flight(url) == 0)
        assert generator.closed.is_set()


def test_a_client_that_reads_nothing_is_disconnected_long_before_the_time_limit():
    generator = LargePieces(Clock())
    with serving(make_pipeline(generator), read_timeout_seconds=0.3) as url, connected(url) as connection:
        connection.sendall(request_of(CHAT, chat(stream=True)))
        assert generator.entered.wait(60)
        assert generator.closed.wait(60)
        wait_until(lambda: in_flight(url) == 0)


def test_a_step_that_outlasts_the_time_limit_ends_itself(monkeypatch: pytest.MonkeyPatch):
    """A long prompt cannot be stopped halfway: its client is told, and the iterator is closed after the step."""

    class LongStep(EndlessGenerator):
        def step(self) -> None:
            if self.steps > 1:
                clock.advance(3)

    generator, clock = LongStep(), clock_of_requests(monkeypatch)
    with serving(make_pipeline(generator), request_timeout_seconds=1) as url:
        answer = post(url, stream=True).text
        assert "word " in answer
        assert "request_timeout" in answer
        assert generator.steps == 2
        assert generator.closed.wait(60)
        wait_until(lambda: in_flight(url) == 0)
