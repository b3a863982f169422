"""The HTTP service under its own limits: the worst bodies, long conversations, and cached answers under load.

    python -m benchmarks.service_limits --out DIR [--part bodies|conversations|load]

A generator without weights answers, so that the figures are those of the service. Bodies have the largest size that
the limits allow, and the shapes that cost most. ``silence_ms`` is the longest time for which the event loop did
nothing else, and ``/livez`` was silent; the median of three. Load: connections that send the same question again as
soon as it is answered, from another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from rag_posfix.caching.answers.memory import MemoryCache
from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.evaluation.record import environment, write_record
from rag_posfix.settings import ServiceSettings, Settings
from rag_posfix_api.app import create_app
from tests.support.serving import BRIDGE, CHAT, HARBOUR, chat, make_pipeline, serving

OPEN = b'{"messages":[{"role":"user","content":"hi"}],"documents":['
JSON = {"content-type": "application/json"}
PARTS = ("bodies", "conversations", "load")


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="all without it; may be given again")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the load")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser.parse_args(arguments)


def bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each body; none is larger than ``size``."""
    room = size - 200

    def turns(count: int) -> bytes:
        roles = ("assistant", "user")
        return json.dumps({"messages": [{"role": roles[i % 2], "content": "a"} for i in range(count)]}).encode()

    yield "empty documents", OPEN + b"{}," * (room // 3) + b"{}]}"
    yield "empty strings", OPEN + b'"",' * (room // 3) + b'""]}'
    yield "as many wrong documents as fit a list", OPEN + b"{}," * 4095 + b"{}]}"
    yield "brackets", b"[" * room
    yield "escaped quotes", b'{"a":"' + b'\\"' * (room // 2) + b'"}'
    yield "lone surrogates", OPEN + b'"' + b"\\ud800" * (room // 6) + b'"]}'
    yield "a long question", b'{"messages":[{"role":"user","content":"' + b"x " * (room // 2) + b'"}]}'
    yield "a long role", b'{"messages":[{"role":"' + b"x" * room + b'","content":"a"}]}'
    yield "a long order", OPEN + b'""],"order":"' + b"x" * room + b'"}'
    yield "unknown fields", b"{" + b",".join(b'"k%d":1' % i for i in range(24_000)) + b"}"
    extra = b",".join(b'"k%d":1' % i for i in range(16_000))
    yield "unknown fields of a method", OPEN + b'""],"mitigation":{' + extra + b"}}"
    yield (
        "parts",
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4000}]}).encode(),
    )
    yield "turns", turns(4096)


async def silence_of(app: Any, body: bytes) -> tuple[int, float]:
    """Return the status, and the longest silence of the event loop in ms, of one request."""
    import httpx2 as http

    gaps: list[float] = []
    done = asyncio.Event()

    async def beat() -> None:
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        gaps.append(time.perf_counter() - last)

    async with http.AsyncClient(transport=http.ASGITransport(app), base_url="http://service") as client:
        heart = asyncio.create_task(beat())
        await asyncio.sleep(0)
        response = await client.post(CHAT, content=body, headers=JSON)
        done.set()
        await heart
    return response.status_code, 1e3 * max(gaps)


def measure_bodies() -> dict[str, Any]:
    limits = ServiceSettings()
    app = create_app(Settings(), make_pipeline(), limits)
    found: dict[str, Any] = {}
    for name, body in bodies(limits.max_body_bytes):
        runs = [asyncio.run(silence_of(app, body)) for _ in range(3)]
        found[name] = {
            "bytes": len(body),
            "status": runs[0][0],
            "silence_ms": round(statistics.median(run[1] for run in runs), 1),
        }
        print(name, found[name], file=sys.stderr)
    return {"bodies": found, "worst_silence_ms": max(body["silence_ms"] for body in found.values())}


def measure_conversations() -> dict[str, Any]:
    """Assembly alone, without the limit on the number of messages."""
    assembler = make_pipeline(window=2**22).assembler
    seconds = {}
    for count in (4_000, 16_000, 64_000):
        history = [{"role": role, "content": "a"} for role in ("user", "assistant")] * (count // 2)
        started = time.process_time()
        assembler.assemble("Why?", history=history)
        seconds[count] = round(time.process_time() - started, 3)
    return {"assembly_s_by_turns": seconds}


def ask(port: int, body: bytes, seconds: float, latencies: list[float]) -> None:
    """Send ``body`` again and again over one connection."""
    lines = (f"POST {CHAT} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}")
    request = "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(65536)
            head_bytes, _, rest = answer.partition(b"\r\n\r\n")
            if not head_bytes.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head_bytes.decode())
            length = int(head_bytes.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            while len(rest) < length:
                rest += connection.recv(65536)
            latencies.append(time.perf_counter() - started)


def client(port: int, body: bytes, connections: int, seconds: float) -> list[float]:
    latencies: list[float] = []
    threads = [threading.Thread(target=ask, args=(port, body, seconds, latencies)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def measure_load(connections: int, seconds: float) -> dict[str, Any]:
    cache = TieredAnswerCache([MemoryCache(max_entries=100)])
    body = json.dumps(chat(documents=[BRIDGE, HARBOUR])).encode()
    with serving(make_pipeline(cache=cache)) as url, multiprocessing.get_context("spawn").Pool(1) as pool:
        httpx2.post(url + CHAT, content=body, headers=JSON)
        port = int(url.rsplit(":", 1)[1])
        pool.apply(client, (port, body, connections, 0.5))
        used = time.process_time()
        latencies = pool.apply(client, (port, body, connections, seconds))
        used = time.process_time() - used
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "connections": connections,
        "requests": len(latencies),
        "requests_per_s": round(len(latencies) / seconds, 1),
        "p50_ms": round(1e3 * cuts[49], 2),
        "p99_ms": round(1e3 * cuts[98], 2),
        "processor_ms_per_request": round(1e3 * used / len(latencies), 3),
    }


def main() -> None:
    given = options()
    parts = given.part or PARTS
    load = {"before": os.getloadavg()}
    summary: dict[str, Any] = {}
    if "bodies" in parts:
        summary |= measure_bodies()
    if "conversations" in parts:
        summary |= measure_conversations()
    if "load" in parts:
        summary["cached"] = measure_load(given.connections, given.seconds)
    print(json.dumps(summary, indent=2))
    if given.out is not None:
        load["after"] = os.getloadavg()
        settings = {"connections": given.connections, "seconds": given.seconds}
        head = {"kind": "service-limits", **environment(), "load_average": load, "settings": settings}
        print(write_record(given.out, "service-limits", {**head, "summary": summary}))


if __name__ == "__main__":
    main()
