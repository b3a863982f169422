"""The service under load: cached answers, reranking, many streams, what HTTP adds to the engine, and wrong keys.

    python -m benchmarks.service_load --out DIR [--part cached|rerank|streams|added|keys] [--rate 300] [--seconds 10]

``cached`` is an open loop: requests are sent at a fixed rate, whether or not earlier ones were answered, and latency
counts from the moment at which a request was due. ``rerank`` scores 20 short documents with MiniLM, ``added`` asks
SmolLM2 the same prompts directly and over HTTP by turns. ``keys`` sends wrong secrets for one key on 200 connections,
each again as soon as it is answered. Meanwhile 15 other keys are used for the first time, and ``/livez`` is asked 100
times a second. The key file has the digests of this release, then the scrypt hashes of earlier ones. Clients of
``cached`` and ``keys`` are processes of their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.faults.service import Connection, Host, body_of, correct_answer, text_of
from rag_posfix.evaluation.record import environment, write_record
from rag_posfix_api.keys.store import KeyStore
from tests.support.old_keys import make_old
from tests.support.serving import CHAT, serving

PARTS = ("cached", "rerank", "streams", "added", "keys")
CONNECTIONS = 16
_SECRET = 43
"""Characters of the secret part of a key, at its end."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.service_load", description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="measure this part; repeatable; default: all")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser.parse_args(arguments)


def open_loop(url: str, body: bytes, rate: float, seconds: float) -> list[float]:
    """Return the seconds from when each request was due until its answer was complete."""
    latencies: list[float] = []
    begin, count = time.perf_counter() + 0.2, int(rate * seconds)

    def send(first: int) -> None:
        connection = Connection(url)
        for number in range(first, count, CONNECTIONS):
            due = begin + number / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            status, _ = connection.post(CHAT, body)
            if status != 200:
                raise RuntimeError(f"status {status}")
            latencies.append(time.perf_counter() - due)
        connection.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(send, range(CONNECTIONS)))
    return latencies


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100)
    return {"requests": len(latencies), "p50_ms": round(1e3 * cuts[49], 2), "p99_ms": round(1e3 * cuts[98], 2)}


def cached(rate: float, seconds: float) -> dict[str, Any]:
    body = body_of(1)
    with Host() as host, multiprocessing.get_context("spawn").Pool(1) as pool:
        url = host.serve()
        pool.apply(open_loop, (url, body, rate, 1.0))
        return {"rate": rate, **quantiles(pool.apply(open_loop, (url, body, rate, seconds)))}


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

    from rag_posfix.contracts.answer import Question
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
    measured = {}
    for name in ("digests", "scrypt hashes"):
        with (
            tempfile.TemporaryDirectory() as folder,
            Host() as host,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            store = KeyStore(Path(folder))
            secrets = [store.create(f"tenant{number}")[1] for number in range(count + 1)]
            if name == "scrypt hashes":
                make_old(Path(folder), *secrets)
            url = host.serve(limits={"data_dir": folder})
            measured[name] = wrong_keys(url, secrets[0], secrets[1:], seconds, process)
    return measured


def wrong_keys(
    url: str, attacked: str, valid: Sequence[str], seconds: float, flooding: Executor, connections: int = 200
) -> dict[str, Any]:
    """Measure first uses of valid keys, and ``/livez``, while wrong secrets for another key are sent."""
    wrong = attacked[:-_SECRET] + "A" * _SECRET
    flooding.submit(flood, url, wrong, 1, 0.1).result()
    livez(url, 0.5)
    quiet = livez(url, seconds)
    flooded = flooding.submit(flood, url, wrong, connections, seconds + 2.0)
    time.sleep(2.0)  # until all are connected
    with ThreadPoolExecutor(1) as watcher:
        watched = watcher.submit(livez, url, seconds)
        uses = [use(url, key) for key in valid]
        busy = watched.result()
    return {
        "connections": connections,
        "wrong_per_s": round(flooded.result() / (seconds + 2.0), 1),
        "valid": len(uses),
        "refused": sum(status != 200 for status, _ in uses),
        "slowest_valid_ms": round(1e3 * max(spent for _, spent in uses), 1),
        "livez_quiet": quantiles(quiet),
        "livez": quantiles(busy),
    }


def use(url: str, key: str) -> tuple[int, float]:
    connection, started = Connection(url), time.perf_counter()
    status, _ = connection.send(get("/v1/models", key))
    spent = time.perf_counter() - started
    connection.close()
    return status, spent


def get(path: str, key: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n\r\n".encode()


def flood(url: str, key: str, connections: int, seconds: float) -> int:
    """Send a key on connections, again as soon as it is answered; return the number of answers in this time."""
    end, answers = time.monotonic() + seconds, []

    def send() -> None:
        connection = Connection(url, timeout=seconds)
        with suppress(TimeoutError):
            while time.monotonic() < end:
                status, _ = connection.send(get("/v1/models", key))
                if time.monotonic() < end:
                    answers.append(status)
        connection.close()

    with ThreadPoolExecutor(connections) as pool:
        for _ in range(connections):
            pool.submit(send)
    return len(answers)


def livez(url: str, seconds: float, rate: float = 100.0) -> list[float]:
    """Return the seconds from when each request for ``/livez`` was due until it was answered."""
    connection, latencies, begin = Connection(url), [], time.perf_counter()
    for number in range(int(rate * seconds)):
        due = begin + number / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        if connection.send(get("/livez"))[0] != 200:
            raise RuntimeError("/livez failed")
        latencies.append(time.perf_counter() - due)
    connection.close()
    return latencies


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    chosen = options(arguments)
    load = {"before": os.getloadavg()}
    measured: dict[str, Callable[[], dict[str, Any]]] = {
        "cached": lambda: cached(chosen.rate, chosen.seconds),
        "rerank": lambda: rerank(chosen.seconds),
        "streams": streams,
        "added": added,
        "keys": lambda: keys(chosen.seconds),
    }
    summary: dict[str, Any] = {name: measured[name]() for name in chosen.part or PARTS}
    print(json.dumps(summary, indent=2))
    if chosen.out is not None:
        load["after"] = os.getloadavg()
        settings = {"rate": chosen.rate, "seconds": chosen.seconds}
        head = {"kind": "service-load", **environment(), "load_average": load, "settings": settings}
        print(write_record(chosen.out, "service-load", {**head, "summary": summary}))
    return summary


if __name__ == "__main__":
    main()
