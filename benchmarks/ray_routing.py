"""Routers of Ray Serve on shuffled passages, with two replicas of the packaged model, and a replica that is killed.

    python -m benchmarks.ray_routing [--questions 36] [--out DIR]

Questions are about one of six topics with four passages each, which come in a new order every time. A replica has
memory for the keys and values of two thirds of all passages. Each router begins with empty replicas. The answer cache
is off. Throughput and times are given as ratios to round robin: all run on the same cores, one after another.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from rag_posfix.demo_data import load_passages
from rag_posfix.evaluation.record import environment, write_record
from rag_posfix.settings import Settings
from rag_posfix_api.ray_serve.application import ModelParts, describe_model, load_model, make_application
from rag_posfix_api.ray_serve.options import ApplicationOptions
from rag_posfix_api.ray_serve.replica import ReplicaModel

__all__ = ["main"]

PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
ROUTERS = {
    "round robin": "benchmarks.ray_routers.RoundRobinRouter",
    "prefix affinity": PREFIX,
    "overlap": "overlap",
}
TOPICS, PASSAGES_PER_TOPIC, CLIENTS, REPLICAS = 6, 4, 4, 2
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Keys and values of SmolLM2-135M: layers, keys and values, heads, dimensions, bytes of float32."""
MEMORY_TOKENS_SHARE = 2 / 3
WORDS = 50


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was answered: seconds, and tokens of the prompt, read from the store and in all."""

    status: int
    seconds: float
    cached_tokens: int
    prompt_tokens: int
    text: str


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ray_routing", description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=36, help="for each router")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    given = parser.parse_args(arguments)
    with cluster() as (folder, url):
        found: dict[str, dict[str, float]] = {}
        for name, router in ROUTERS.items():
            print(name, file=sys.stderr)
            with served(name, router, folder, url) as processes:
                found[name] = measured(url, given.questions)
                print(found[name], file=sys.stderr)
                if router == "overlap":
                    killed = kill_under_load(processes, url, given.questions)
    summary = {"routers": with_ratios(found), "killed": killed}
    settings: dict[str, Any] = {
        "questions": given.questions, "topics": TOPICS, "passages_per_topic": PASSAGES_PER_TOPIC,
        "words_per_passage": WORDS, "clients": CLIENTS, "replicas": REPLICAS, "memory_bytes": memory_bytes(),
        "mitigation": "parallel_windows", "max_tokens": 4,
    }  # fmt: skip
    print(summary)
    if given.out is not None:
        head = {"kind": "ray-routing", "environment": environment(), "settings": settings, "summary": summary}
        print(write_record(given.out, "ray-routing", head))


@contextmanager
def cluster() -> Iterator[tuple[Path, str]]:
    """Start Ray and Ray Serve on this machine; yield a folder and the address of the service."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray starts workers with 15
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
            _temp_dir=f"{folder}/r",
        )  # fmt: skip
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Path(folder), f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def served(name: str, router: str, folder: Path, url: str) -> Iterator[Path]:
    """Serve with a router; yield the folder with a file for each replica, named after its process."""
    from ray import serve

    options = ApplicationOptions(
        settings={
            "model": "smollm2", "dtype": "float32", "device": "cpu", "mitigation": "parallel_windows",
            "cache": {"enabled": False}, "cache_dir": str(folder / "cache"),
            "passages": {"memory_bytes": memory_bytes(), "disk_bytes": 0},
        },
        service={"max_concurrent": 2}, min_replicas=REPLICAS, max_replicas=REPLICAS, replica_cpus=1, ingress_cpus=0.1,
        router=router, allow_anonymous=True,
    )  # fmt: skip
    processes = folder / name.replace(" ", "-")
    processes.mkdir()
    serve.run(make_application(options, ModelParts(partial(load, processes), describe_model)), name="bench")
    try:
        while httpx2.get(url + "/readyz").status_code != 200:
            time.sleep(0.2)
        yield processes
    finally:
        serve.delete("bench")


def load(processes: Path, settings: Settings) -> ReplicaModel:
    loaded = load_model(settings)
    (processes / str(os.getpid())).touch()
    return loaded


def topics() -> list[list[str]]:
    """Return the passages of each topic: consecutive passages of the demo corpus, repeated to one length."""
    texts = [document.page_content for document in load_passages()]
    count = TOPICS * PASSAGES_PER_TOPIC
    cut = [" ".join((f"{n}. {texts[n % len(texts)]} " * 9).split()[:WORDS]) for n in range(count)]
    return [cut[start : start + PASSAGES_PER_TOPIC] for start in range(0, count, PASSAGES_PER_TOPIC)]


def memory_bytes() -> int:
    tokens = TOPICS * PASSAGES_PER_TOPIC * WORDS * 1.4
    return int(tokens * BYTES_PER_TOKEN * MEMORY_TOKENS_SHARE)


def questions(count: int) -> list[tuple[str, list[str]]]:
    rng = random.Random(7)
    found = []
    for number in range(count):
        passages = rng.choice(topics())
        found.append((f"What does text {number % 5} say?", rng.sample(passages, len(passages))))
    return found


def ask(url: str, question: str, passages: Sequence[str]) -> Asked:
    documents = [{"text": text, "score": 1 / (1 + place)} for place, text in enumerate(passages)]
    body = {"model": "default", "messages": [{"role": "user", "content": question}], "documents": documents,
            "max_tokens": 4}  # fmt: skip
    started = time.perf_counter()
    response = httpx2.post(url + "/v1/chat/completions", json=body, timeout=300)
    seconds, answer = time.perf_counter() - started, response.json()
    if response.status_code != 200:
        return Asked(response.status_code, seconds, 0, 0, str(answer))
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(200, seconds, cached, usage["prompt_tokens"], answer["choices"][0]["message"]["content"])


def asked_by_clients(url: str, given: Sequence[tuple[str, list[str]]], done: Callable[[int], None]) -> list[Asked]:
    """Return the answers, in order; four clients ask one question after another."""
    answers: dict[int, Asked] = {}
    left, lock = iter(range(len(given))), threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            answers[number] = ask(url, *given[number])
            done(len(answers))

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return [answers[number] for number in range(len(given))]


def measured(url: str, count: int) -> dict[str, float]:
    started = time.perf_counter()
    answers = asked_by_clients(url, questions(count), lambda _: None)
    seconds = time.perf_counter() - started
    failed = [one for one in answers if one.status != 200]
    if failed:
        raise SystemExit(f"{len(failed)} questions failed: {failed[0]}")
    return {
        "hit_rate": sum(one.cached_tokens for one in answers) / sum(one.prompt_tokens for one in answers),
        "p50_seconds": statistics.median(one.seconds for one in answers),
        "questions_per_second": count / seconds,
    }


def with_ratios(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    base = found["round robin"]
    return {
        name: {
            **one,
            "p50_ratio": one["p50_seconds"] / base["p50_seconds"],
            "throughput_ratio": one["questions_per_second"] / base["questions_per_second"],
        }
        for name, one in found.items()
    }


def kill_under_load(processes: Path, url: str, count: int) -> dict[str, int]:
    """Kill one of two replicas after a quarter of the questions; return how many failed, and how many differ.

    An answer differs if it is not the one that the same question gets afterwards.
    """
    given = questions(count)
    once = threading.Event()

    def kill(answered: int) -> None:
        if answered >= count // 4 and not once.is_set():
            once.set()
            os.kill(int(next(processes.iterdir()).name), signal.SIGKILL)

    answers = asked_by_clients(url, given, kill)
    again = asked_by_clients(url, given, lambda _: None)
    return {
        "asked": count,
        "failed": sum(one.status != 200 for one in answers),
        "different": sum(one.text != other.text for one, other in zip(answers, again, strict=True)),
    }


if __name__ == "__main__":
    main()
