"""The service under load: cached answers, reranking, many streams, what HTTP adds to the engine, and wrong keys.

    python -m benchmarks.service_load --out DIR [--part cached|echo|processes|rerank|streams|added|keys] [--rate 300]
        [--seconds 10]

``cached`` is an open loop: requests are sent at a fixed rate, whether or not earlier ones were answered, and latency
counts from the moment at which a request was due. ``echo`` compares the CPU of a cached answer with that of a FastAPI
route that returns the same body, and of the pipeline alone. ``processes`` asks one and two processes of the service
for cached answers as fast as they give them. ``rerank`` scores 20 short documents with MiniLM, ``added`` asks SmolLM2
the same prompts directly and over HTTP by turns. ``keys`` sends wrong secrets on 200 connections, each again
as soon as it is answered. Meanwhile 15 keys are used for the first time, ``/livez`` is asked 100 times a second, and a
cached answer 50 times. The wrong secrets are for these keys and for
a 16th. Clients of ``cached`` and ``keys`` are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.faults.service import Connection, Host, body_of, correct_answer, text_of
from benchmarks.long_texts import cpu_seconds
from benchmarks.study import study_options, write_study
from rag_posfix.caching.answers.tiered import build_answer_cache
from rag_posfix.contracts.answer import Question
from rag_posfix.settings import CacheSettings
from rag_posfix_api.keys.store import KeyStore
from tests.support.redis_server import free_port
from tests.support.serving import CHAT, WordReranker, make_pipeline, serving
from tests.support.waiting import wait_until

PARTS = ("cached", "echo", "processes", "rerank", "streams", "added", "keys")
CONNECTIONS = 16
_SECRET = 43
"""Characters of the secret part of a key, at its end."""

TABLE = {
    "cached": (
        "cached answers, {rate:.0f} requests/s, {requests} requests", "p50 < 5 ms, p99 < 25 ms",
        "p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms",
    ),
    "rerank": (
        "rerank of 20 short documents by embedding, {requests} requests", "p50 < 150 ms",
        "p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms",
    ),
    "streams": ("{streams} streams at the same time", "all complete", "{complete} complete"),
    "added": ("time that HTTP adds to an answer of the engine", "< 5 %", "{added_percent:+.1f} %"),
}  # fmt: skip
"""Of the record: load, limit and measurement."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_options("service_load", __doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this part; repeatable; default: all")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    return parser.parse_args(arguments)


def open_loop(url: str, body: bytes, rate: float, seconds: float) -> list[float]:
    """Return the seconds from when each request was due until its answer was complete."""
    begin = time.perf_counter() + 0.2

    def send(number: int) -> list[float]:
        return polled(url, seconds, path=CHAT, body=body, rate=rate / CONNECTIONS, begin=begin + number / rate)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return [latency for latencies in pool.map(send, range(CONNECTIONS)) for latency in latencies]


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100)
    return {"requests": len(latencies), "p50_ms": round(1e3 * cuts[49], 2), "p99_ms": round(1e3 * cuts[98], 2)}


def cached(rate: float, seconds: float) -> dict[str, Any]:
    body = body_of(1)
    with Host() as host, multiprocessing.get_context("spawn").Pool(1) as pool:
        url = host.serve()
        pool.apply(open_loop, (url, body, rate, 1.0))
        return {"rate": rate, **quantiles(pool.apply(open_loop, (url, body, rate, seconds)))}


def echo(count: int = 1500) -> dict[str, Any]:
    """Compare the CPU of a cached answer with that of a FastAPI route that checks and returns the same body."""
    body, spawned = body_of(1), multiprocessing.get_context("spawn")
    port, spent = free_port(), defaultdict[str, list[float]](list)
    other = spawned.Process(target=_serve_echo, args=(port,), daemon=True)
    other.start()
    with Host() as host:
        servers = {"answer": (host.serve(), host.pid), "echo": (f"http://127.0.0.1:{port}", int(other.pid or 0))}
        for name, (url, pid) in [*servers.items()] * 4:
            wait_until(partial(_answers, url, body))
            connection = Connection(url)
            for _ in range(100):
                connection.post(CHAT, body)
            before = cpu_seconds(pid)
            for _ in range(count):
                connection.post(CHAT, body)
            spent[name].append(1e3 * (cpu_seconds(pid) - before) / count)
            connection.close()
    other.kill()
    answer_ms, echo_ms, pipeline_ms = min(spent["answer"]), min(spent["echo"]), _pipeline_ms(count)
    rounded = {"answer_ms": round(answer_ms, 3), "echo_ms": round(echo_ms, 3), "pipeline_ms": round(pipeline_ms, 3)}
    return {**rounded, "ratio": round(answer_ms / echo_ms, 1)}


def _pipeline_ms(count: int) -> float:
    """Return the CPU of a cached answer in a process without HTTP."""
    from langchain_core.documents import Document

    body = json.loads(body_of(1))
    documents = [Document(text, id=str(number)) for number, text in enumerate(body["documents"])]
    question = Question(body["messages"][0]["content"], documents=documents)
    cache = build_answer_cache(CacheSettings(memory_entries=20, disk_bytes=0), Path("."))
    pipeline, spent = make_pipeline(cache=cache, reranker=WordReranker()), []
    for _ in range(4):
        started = time.process_time()
        for _ in range(count):
            pipeline.ask(question)
        spent.append(1e3 * (time.process_time() - started) / count)
    pipeline.close()
    return min(spent)


def processes(seconds: float) -> dict[str, Any]:
    """Count the cached answers that one and two processes of the service give to as many clients as they can serve."""
    measured = {}
    for count in (1, 2):
        with ExitStack() as stack:
            hosts = [stack.enter_context(Host()) for _ in range(count)]
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(count))
            urls = [host.serve() for host in hosts]
            pool.starmap(closed_loop, [(url, 1.0) for url in urls])
            before = sum(cpu_seconds(host.pid) for host in hosts)
            answers = sum(pool.starmap(closed_loop, [(url, seconds) for url in urls]))
            spent = sum(cpu_seconds(host.pid) for host in hosts) - before
            rate = {"per_s": round(answers / seconds), "per_core_s": round(answers / spent)}
            measured[f"{count} processes"] = {"answers": answers, **rate}
    return measured


def closed_loop(url: str, seconds: float) -> int:
    """Ask for cached answers on connections, each again as soon as it is answered; return their number."""
    end, body = time.monotonic() + seconds, body_of(1)

    def send(_: int) -> int:
        connection, answers = Connection(url), 0
        while time.monotonic() < end:
            answers += connection.post(CHAT, body)[0] == 200
        connection.close()
        return answers

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(send, range(4)))


def _answers(url: str, body: bytes) -> bool:
    connection = Connection(url)
    try:
        return connection.post(CHAT, body)[0] == 200
    except OSError:
        return False
    finally:
        connection.close()


def _serve_echo(port: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Body(BaseModel):
        model: str
        messages: list[dict[str, str]]
        documents: list[str]

    async def respond(body: Body) -> Body:
        return body

    respond.__annotations__.update(body=Body)  # the class is local
    respond.__annotations__["return"] = Body
    app = FastAPI()
    app.post(CHAT)(respond)
    uvicorn.run(app, port=port, log_level="error", access_log=False)


def rerank(seconds: float) -> dict[str, Any]:
    from rag_posfix.assembly.assembler import Assembler
    from rag_posfix.generation.fake import FakeGenerator
    from rag_posfix.pipeline.build import build_embeddings
    from rag_posfix.pipeline.pipeline import Pipeline
    from rag_posfix.reranking.embedding import EmbeddingReranker
    from rag_posfix.settings import Settings
    from tests.support.toy_encoder import ToyEncoder

    encoder = ToyEncoder()
    reranker = EmbeddingReranker(embeddings=build_embeddings(Settings()))
    pipeline = Pipeline(FakeGenerator(encoder), Assembler(encoder, 8192), reranker=reranker)
    body = {"model": "default", "query": "When did station 7 begin?"}
    latencies = []
    with serving(pipeline) as url, httpx2.Client(timeout=60) as client:
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end or number < 10:
            number += 1
            documents = [f"{correct_answer(20 * number + index)}." for index in range(20)]  # new ones every time
            started = time.perf_counter()
            client.post(url + "/v1/rerank", json={**body, "documents": documents}).raise_for_status()
            latencies.append(time.perf_counter() - started)
    return quantiles(latencies[2:])


def streams(count: int = 50) -> dict[str, Any]:
    def is_complete(number: int) -> bool:
        connection = Connection(url, timeout=120)
        status, answer = connection.post(CHAT, body_of(number, stream=True, cache=False))
        connection.close()
        return status == 200 and text_of(answer) == correct_answer(number) and b"[DONE]" in answer

    with Host() as host, ThreadPoolExecutor(count) as pool:
        url = host.serve(limits={"max_queue": count})
        started = time.perf_counter()
        complete = sum(pool.map(is_complete, range(count)))
        return {"streams": count, "complete": complete, "seconds": round(time.perf_counter() - started, 2)}


def added(rounds: int = 7, max_tokens: int = 48) -> dict[str, Any]:
    """The same requests by turns, so that what else the machine does meets both."""
    from langchain_core.documents import Document

    from rag_posfix.contracts.request import Sampling
    from rag_posfix.pipeline.build import build_pipeline
    from rag_posfix.settings import CacheSettings, PassageStoreSettings, Settings

    settings = Settings(cache=CacheSettings(enabled=False), passages=PassageStoreSettings(enabled=False))
    pipeline = build_pipeline(settings)
    direct, over_http = [], []
    with serving(pipeline) as url, httpx2.Client(timeout=300) as client:
        for number in range(rounds + 1):
            body = json.loads(body_of(number, max_tokens=max_tokens, temperature=0))
            documents = [Document(page_content=text, id=str(i)) for i, text in enumerate(body["documents"])]
            question = Question(
                body["messages"][0]["content"], documents=documents, sampling=Sampling(max_tokens=max_tokens)
            )
            started = time.perf_counter()
            answer = pipeline.ask(question)
            middle = time.perf_counter()
            response = client.post(url + CHAT, json=body).raise_for_status()
            direct.append(middle - started)
            over_http.append(time.perf_counter() - middle)
            if text_of(response.content) != answer.text:
                raise RuntimeError("the answer over HTTP is another one")
    pipeline.close()
    ratios = [http / engine for http, engine in zip(over_http[1:], direct[1:], strict=True)]
    return {
        "engine_ms": round(1e3 * statistics.median(direct[1:]), 1),
        "http_ms": round(1e3 * statistics.median(over_http[1:]), 1),
        "added_percent": round(100 * (statistics.median(ratios) - 1), 2),
    }


def keys(seconds: float, count: int = 15) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Host() as host,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        store = KeyStore(Path(folder))
        secrets = [store.create(f"tenant{number}")[1] for number in range(count + 1)]
        url = host.serve(limits={"data_dir": folder})
        return {"digests": wrong_keys(url, secrets, secrets[1:], seconds, process)}


def wrong_keys(
    url: str, attacked: Sequence[str], valid: Sequence[str], seconds: float, flooding: Executor, connections: int = 200
) -> dict[str, Any]:
    """Measure first uses of valid keys, ``/livez`` and cached answers while wrong secrets of ``attacked`` are sent."""
    wrong = [key[:-_SECRET] + "A" * _SECRET for key in attacked]
    answer: dict[str, Any] = {"key": valid[0], "path": CHAT, "body": body_of(1), "rate": 50.0}
    flooding.submit(flood, url, wrong, 1, 0.1).result()
    polled(url, 0.5)
    with ThreadPoolExecutor(2) as watchers:
        use(url, valid[0])
        polled(url, 0.5, **answer)
        watched = watchers.submit(polled, url, seconds), watchers.submit(polled, url, seconds, **answer)
        quiet, quiet_answers = (each.result() for each in watched)
        flooded = flooding.submit(flood, url, wrong, connections, seconds + 2.0)
        time.sleep(2.0)  # until all are connected
        watched = watchers.submit(polled, url, seconds), watchers.submit(polled, url, seconds, **answer)
        uses = [use(url, key) for key in valid]
        busy, busy_answers = (each.result() for each in watched)
    return {
        "connections": connections,
        "wrong_per_s": round(flooded.result() / (seconds + 2.0), 1),
        "valid": len(uses),
        "refused": sum(status != 200 for status, _ in uses),
        "slowest_valid_ms": round(1e3 * max(spent for _, spent in uses), 1),
        "livez_quiet": quantiles(quiet),
        "livez": quantiles(busy),
        "cached_quiet": quantiles(quiet_answers),
        "cached": quantiles(busy_answers),
    }


def use(url: str, key: str) -> tuple[int, float]:
    connection, started = Connection(url), time.perf_counter()
    status, _ = connection.send(get("/v1/models", key))
    spent = time.perf_counter() - started
    connection.close()
    return status, spent


def get(path: str, key: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n\r\n".encode()


def flood(url: str, keys: Sequence[str], connections: int, seconds: float) -> int:
    """Send keys on connections, again as soon as it is answered; return the number of answers in this time."""
    end, answers = time.monotonic() + seconds, []

    def send(key: str) -> None:
        connection = Connection(url, timeout=seconds)
        with suppress(TimeoutError):
            while time.monotonic() < end:
                status, _ = connection.send(get("/v1/models", key))
                if time.monotonic() < end:
                    answers.append(status)
        connection.close()

    with ThreadPoolExecutor(connections) as pool:
        for number in range(connections):
            pool.submit(send, keys[number % len(keys)])
    return len(answers)


def polled(
    url: str,
    seconds: float,
    *,
    path: str = "/livez",
    key: str = "",
    body: bytes = b"",
    rate: float = 100.0,
    begin: float | None = None,
) -> list[float]:
    """Return the seconds from when each request on one connection was due until it was answered."""
    connection, latencies, begin = Connection(url), [], begin or time.perf_counter()
    headers = f"Content-Type: application/json\r\nx-api-key: {key}\r\n"
    for number in range(round(rate * seconds)):
        due = begin + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        status, _ = connection.post(path, body, headers) if body else connection.send(get(path, key))
        if status != 200:
            raise RuntimeError(f"{path} failed")
        latencies.append(time.perf_counter() - due)
    connection.close()
    return latencies


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "cached": lambda: cached(chosen.rate, chosen.seconds),
        "echo": echo,
        "processes": lambda: processes(chosen.seconds),
        "rerank": lambda: rerank(chosen.seconds),
        "streams": streams,
        "added": added,
        "keys": lambda: keys(chosen.seconds),
    }
    summary: dict[str, Any] = {name: measured[name]() for name in chosen.part or PARTS}
    print(json.dumps(summary, indent=2))
    rows = [[cell.format(**summary[load]) for cell in row] for load, row in TABLE.items() if load in summary]
    tables = {"service-load": {"columns": ["load", "limit", "measured"], "rows": rows}}
    write_study(chosen, "service-load", summary, tables=tables)
    return summary


if __name__ == "__main__":
    main()
