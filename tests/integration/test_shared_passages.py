"""One Redis, several services: a passage that one process has read is warm for another of the same model and dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.redis_server import RedisServer, free_port
from tests.support.subprocesses import wait_until_ready
from tests.support.tiny import save_tiny
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Replica:
    """A service in a process of its own."""

    port: str

    def ask(self, question: str, passages: list[str]) -> dict[str, Any]:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": question}],
            # With scores, so that no embedding model is loaded.
            "documents": [{"text": text, "score": 1 / (1 + number)} for number, text in enumerate(passages)],
            "max_tokens": 4,
        }
        response = httpx2.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def redis_lookups(self, result: str) -> float:
        """How many passages were found in Redis, or not, as /metrics has it."""
        name = f'rag_posfix_cache_tier_lookups_total{{cache="passages",result="{result}",tier="redis"}} '
        text = httpx2.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60).text
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.removeprefix(name))


def cached_tokens(response: dict[str, Any]) -> int:
    return response["usage"]["prompt_tokens_details"]["cached_tokens"]


def environment(port: str, model: Path, dtype: str, redis: RedisServer, folder: Path) -> dict[str, str]:
    """The settings of a service whose caches are its own memory and Redis."""
    settings = {
        "SERVICE_PORT": port,
        "MODEL": str(model),
        "DTYPE": dtype,
        "DEVICE": "cpu",
        "MITIGATION": "parallel_windows",
        "CACHE_DIR": str(folder),
        "CACHE_ENABLED": "false",  # the answer cache
        "PASSAGES_REDIS_URL": redis.url,
        "PASSAGES_REDIS_TIMEOUT_SECONDS": "20",  # the machine may be busy
        "PASSAGES_DISK_BYTES": "0",
        "PASSAGES_MEMORY_BYTES": str(64 * 1024**2),
    }
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}"}
    return {**paths, **{f"RAG_POSFIX_{name}": value for name, value in settings.items()}}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def replicas(redis, tmp_path_factory, python) -> Iterator[dict[str, Replica]]:
    """Two replicas, one of another dtype, and one of a model whose entries have the same shape; started together."""
    folder = tmp_path_factory.mktemp("replicas")
    model = save_tiny(folder / "model", max_position_embeddings=4096)
    other = save_tiny(folder / "other", max_position_embeddings=4096, rms_norm_eps=1e-5)
    kinds = {
        "first": (model, "float32"), "second": (model, "float32"), "bfloat16": (model, "bfloat16"),
        "other": (other, "float32"),
    }  # fmt: skip
    found = {name: Replica(str(free_port())) for name in kinds}
    with ExitStack() as stack:
        started = {}
        for name, (weights, dtype) in kinds.items():
            cache = folder / f"cache of {name}"
            cache.mkdir()
            settings = environment(found[name].port, weights, dtype, redis, cache)
            log, command = folder / f"{name}.log", ("-m", "rag_posfix.cli.main", "serve")
            started[name] = python.start(ROOT, *command, output=log, environment={**os.environ, **settings})
            stack.callback(started[name].kill)
        for name, process in started.items():
            wait_until_ready(process, found[name].port, 600)
        yield found


@pytest.mark.timeout(700)  # four services start; minutes on a busy machine
def test_a_passage_read_by_one_process_is_warm_for_another_of_that_model_and_dtype(replicas, redis):
    passages = ["The bridge was built in 1911.", "The harbour froze in 1963."]
    redis.command("FLUSHALL")
    first, second = replicas["first"], replicas["second"]

    cold = first.ask("When was the bridge built?", passages)
    own = cached_tokens(cold)  # of the prompt's prefix, which a service reads before it is ready
    # Written after the answer.
    wait_until(lambda: int(redis.command("ZCARD", "rag_posfix:passage-index")[1:]) >= len(passages))

    warm = second.ask("When was the bridge built?", passages)
    assert cached_tokens(warm) - own >= sum(map(len, passages))  # the tiny tokenizer has a token for each letter
    assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
    assert second.redis_lookups("hit") >= len(passages)

    # Another question and another order of the passages.
    again = second.ask("When did the harbour freeze?", passages[::-1])
    assert cached_tokens(again) == cached_tokens(warm)

    for name in ("bfloat16", "other"):
        hits = replicas[name].redis_lookups("hit")
        assert cached_tokens(replicas[name].ask("When was the bridge built?", passages)) == own, name
        assert replicas[name].redis_lookups("hit") == hits, name
