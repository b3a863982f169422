"""Every limit of a request has an error of its own: status, code, and a message with the value and what is allowed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from rag_posfix_api.http.middleware import MAX_DEPTH, MAX_LIST, MAX_VALUES
from tests.support.serving import (
    BRIDGE,
    CHAT,
    HARBOUR,
    EndlessGenerator,
    GatedGenerator,
    gauge,
    in_flight,
    make_pipeline,
    post,
    running,
    serving,
)
from tests.support.waiting import wait_until

JSON = {"content-type": "application/json"}


def sent(content: bytes) -> Callable[[str], httpx2.Response]:
    return lambda url: httpx2.post(url + CHAT, content=content, headers=JSON, timeout=60)


def asked(**fields: Any) -> Callable[[str], httpx2.Response]:
    return lambda url: post(url, **fields)


def in_chunks(url: str) -> httpx2.Response:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 100

    return httpx2.post(url + CHAT, content=chunks(), headers=JSON, timeout=60)


def with_a_long_header(url: str) -> httpx2.Response:
    return httpx2.get(url + "/livez", headers={"x-long": "x" * 40_000}, timeout=60)


def too_slowly(url: str) -> httpx2.Response:
    """What a client that sends half of a request is told, as the response of a client."""
    with socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=60) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n".encode() + b"{")
        found = b""
        while data := connection.recv(65536):
            found += data
    head, _, body = found.partition(b"\r\n\r\n")
    return httpx2.Response(int(head.split()[1]), content=body)


@dataclass(frozen=True)
class Limit:
    """One limit, and a request that exceeds it. With ``behind``, another request holds the model meanwhile."""

    ask: Callable[[str], httpx2.Response]
    status: int
    code: str
    told: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    behind: bool = False
    endless: bool = False


nested = b'{"x":' + b"[" * 99 + b"]" * 99 + b"}"
values = b'{"x":[' + b"1," * 60_000 + b"1]}"
entries = json.dumps({"messages": [{"role": "user", "content": "hi"}], "documents": [""] * 5000}).encode()
one_each = {"max_concurrent": 1, "max_queue": 1}

LIMITS = {
    "head": Limit(with_a_long_header, 431, "head_too_large", ("bytes so far", "at most 32768")),
    "time to send": Limit(too_slowly, 408, "request_timeout", ("0.3 seconds",), {"read_timeout_seconds": 0.3}),
    "body": Limit(sent(b" " * 2000), 413, "body_too_large", ("2000 bytes", "at most 1000"), {"max_body_bytes": 1000}),
    "body in chunks": Limit(in_chunks, 413, "body_too_large", ("at most 1000",), {"max_body_bytes": 1000}),
    "values": Limit(sent(values), 413, "too_many_values", ("about 60003", f"at most {MAX_VALUES}")),
    "depth": Limit(sent(nested), 413, "nested_too_deep", ("100 levels", f"at most {MAX_DEPTH}")),
    "list": Limit(sent(entries), 413, "list_too_long", ("documents has 5000", f"at most {MAX_LIST}")),
    "documents": Limit(
        asked(documents=[BRIDGE] * 4), 413, "too_many_documents", ("4 entries", "at most 3"), {"max_documents": 3}
    ),
    "stop strings": Limit(asked(stop=["a"] * 17), 400, "invalid_value", ("stop has 17", "at most 16")),
    "length of a stop string": Limit(asked(stop="s" * 300), 400, "invalid_value", ("300", "at most 256")),
    "context window": Limit(asked(max_tokens=9000), 400, "context_length_exceeded", ("max_tokens=9000", "8192")),
    "tokens of a request": Limit(
        asked(max_tokens=900),
        400,
        "token_limit_exceeded",
        ("tokens", "max_tokens_in_flight=900"),
        {"max_tokens_in_flight": 900},
    ),
    "tokens that wait": Limit(
        asked(documents=[HARBOUR], max_tokens=400),
        429,
        "overloaded",
        ("0 tokens wait", "max_queued_tokens=300"),
        {"max_queued_tokens": 300, **one_each},
        behind=True,
    ),
    "requests that wait": Limit(
        asked(documents=[HARBOUR]),
        429,
        "overloaded",
        ("1 requests", "1 are allowed"),
        {"max_concurrent": 1, "max_queue": 0},
        behind=True,
    ),
    "open requests": Limit(
        asked(documents=[HARBOUR]), 429, "overloaded", ("1 requests are open", "1 are"), {"max_open": 1}, behind=True
    ),
    "time in the queue": Limit(
        asked(documents=[HARBOUR]),
        429,
        "overloaded",
        ("queue_timeout_seconds=0.2",),
        {"queue_timeout_seconds": 0.2, **one_each},
        behind=True,
    ),
    "time of an answer": Limit(
        asked(), 504, "timeout", ("request_timeout_seconds=0.3",), {"request_timeout_seconds": 0.3}, endless=True
    ),
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_each_limit_has_an_error_of_its_own(limit: Limit):
    generator = EndlessGenerator() if limit.endless else GatedGenerator()
    with running(make_pipeline(generator), **limit.settings) as (url, server), ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, url) if limit.behind else None
        if first is None:
            generator.gate.set()
        else:
            assert generator.entered.wait(60)
        try:
            refused = limit.ask(url)
        finally:
            server.config.http.read_seconds = 60.0
            generator.gate.set()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (limit.status, limit.code)
        for told in limit.told:
            assert told in error["message"]
        if limit.status == 429:
            assert int(refused.headers["retry-after"]) >= 1
        if first is not None:
            assert first.result().status_code == 200
        wait_until(lambda: in_flight(url) == 0)
        if not limit.endless:  # the service goes on
            assert post(url, max_tokens=20).status_code == 200


def test_what_is_exactly_at_a_limit_is_answered():
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "documents": []}).encode()
    with serving(make_pipeline(), max_documents=3, max_body_bytes=2000) as url:
        for fields in ({"documents": [BRIDGE] * 3}, {"stop": ["a"] * 4}, {"stop": "s" * 256}, {"top_logprobs": 20}):
            assert post(url, logprobs=True, **fields).status_code == 200, fields
        assert httpx2.post(url + CHAT, content=body.ljust(2000), headers=JSON, timeout=60).status_code == 200
        in_chunks = httpx2.post(url + CHAT, content=iter([body, b" " * (2000 - len(body))]), headers=JSON, timeout=60)
        assert in_chunks.status_code == 200


def test_the_code_names_the_limit():
    """Capacity has one code, which clients that try again know; the message names its limit."""
    codes = [limit.code for limit in LIMITS.values()]
    shared = {code for code in codes if codes.count(code) > 1}
    assert shared == {"body_too_large", "invalid_value", "overloaded"}


def test_requests_wait_until_their_tokens_fit_and_none_overtakes():
    generator = GatedGenerator()
    settings = {"max_concurrent": 8, "max_tokens_in_flight": 1500}
    with serving(make_pipeline(generator), **settings) as url, ThreadPoolExecutor(3) as pool:
        first = pool.submit(post, url, max_tokens=900)
        assert generator.entered.wait(60)
        long = pool.submit(post, url, max_tokens=900, documents=[HARBOUR])
        wait_until(lambda: in_flight(url) == 2)
        small = pool.submit(post, url, max_tokens=10)
        wait_until(lambda: gauge(url, 'rag_posfix_waiting_requests{work="answer"}') == 2)
        assert generator.most_running == 1, "1500 tokens hold one of them; the small one does not overtake"
        generator.gate.set()
        assert [one.result().status_code for one in (first, long, small)] == [200] * 3
