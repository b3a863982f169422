"""A fleet in small under load, and what it costs when each of its parts is killed.

    python -m benchmarks.faults.fleet [--seconds 8] [--out DIR]

Two services, each a process of its own with embeddings; a Redis Cluster of six for answers and judgements; passages in
PostgreSQL with pgvector, which must be on the path (``pip install --target DIR --no-deps pgserver`` has both); two
engines, scripted OpenAI servers that answer from the prompt. Every second question skips the answer cache. ``failed``
counts questions without an answer, ``wrong`` wrong answers. ``recovered_s`` is from the restart of the part, of Redis
from the kill, until the part serves again.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from langchain_core.documents import Document

from benchmarks.faults.scenarios import DOCUMENTED, cluster
from benchmarks.faults.service import ROOT, Load, correct_answer, fault_table, summary
from benchmarks.study import study_options, write_study
from benchmarks.tables import table
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from tests.support.engine_process import EngineProcess
from tests.support.postgres import PostgresServer, pgvector_collection, postgres
from tests.support.redis_server import free_port
from tests.support.waiting import wait_until

STATIONS = 12
_START_SECONDS = 400
_numbers = itertools.count()


class Service:
    """``rag-posfix serve`` in a process of its own."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"{port}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAG_POSFIX_")}
        self._environment = {**clean, **variables, "RAG_POSFIX_SERVICE_PORT": port}
        self.start()

    def start(self) -> None:
        """Start the process, which is ready later."""
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "rag_posfix.cli.main", "serve"]
            self._process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        """Return whether the service and its vector store answer."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a service ended: {self._log.read_text()[-2000:]}")
        try:
            return httpx2.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False


def body_of(number: int) -> bytes:
    """Return the request of a question, whose passage is in the vector store."""
    question = {"role": "user", "content": f"When did station {number} begin?"}
    cached = next(_numbers) % 2 == 0
    return json.dumps({"model": "default", "messages": [question], "cache": cached}).encode()


@contextmanager
def fleet() -> Iterator[tuple[list[Service], list[EngineProcess], PostgresServer, Callable[[], None]]]:
    """Start every part; yield them, and what kills a master of Redis until its replica leads."""
    with ExitStack() as parts:
        engines = [parts.enter_context(EngineProcess()) for _ in range(2)]
        redis_url, kill_master = parts.enter_context(cluster(3))
        store = parts.enter_context(postgres())
        texts = [f"{correct_answer(number)}. It is still in use." for number in range(STATIONS)]
        ids = [str(number) for number in range(STATIONS)]
        pgvector_collection(store.url, [Document(page_content=text) for text in texts], ids, SentenceEmbeddings())
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        variables = {
            "MODEL": f"openai:scripted@{engines[0].url},{engines[1].url}", "MITIGATION": "none",
            "MIN_RELEVANCE": "off",
            "RERANKER": "yes_no:top_n=3", "ORDER": "reverse", "K": "3", "CANDIDATES": str(STATIONS),
            "RETRIEVER": f"pgvector:url={store.url},collection=docs", "CACHE_REDIS_URL": redis_url,
            "CACHE_MEMORY_ENTRIES": "4", "SERVICE_DATA_DIR": str(folder / "data"),
        }  # fmt: skip
        services = []
        for _ in range(2):
            services.append(Service(folder, {f"RAG_POSFIX_{key}": value for key, value in variables.items()}))
            parts.callback(services[-1].kill)
        wait_until(lambda: all(service.is_ready() for service in services), _START_SECONDS)
        yield services, engines, store, kill_master


Action = Callable[[], object]


def row(load: Load, seconds: float, kill: Action, serves: Action, restart: Action | None) -> dict[str, Any]:
    """Kill a part under load, restart it after ``seconds`` if ``restart`` is not None, and count."""
    load.outcomes.clear()
    with load.running():
        load.during(seconds)
        started = time.monotonic()
        kill()
        if restart is not None:
            load.during(seconds)
            started = time.monotonic()
            restart()
        wait_until(serves, _START_SECONDS)
        recovered = time.monotonic() - started
        load.during(seconds)
    statuses = Counter(str(outcome.status) for outcome in load.outcomes)
    worst = max(outcome.seconds for outcome in load.outcomes)
    return {
        **summary(load.outcomes), "statuses": statuses, "worst_ms": round(1e3 * worst, 1),
        "undocumented": sum(outcome.status not in DOCUMENTED for outcome in load.outcomes),
        "recovered_s": round(recovered, 2),
    }  # fmt: skip


def measure(seconds: float) -> dict[str, dict[str, Any]]:
    """Return a row for each part."""
    with fleet() as (services, engines, store, kill_master):
        load = Load([service.url for service in services], questions=STATIONS, body=body_of)

        def both_ready() -> bool:
            return all(service.is_ready() for service in services)

        rows = {"none": row(load, seconds, lambda: None, both_ready, None)}
        rows["service"] = row(load, seconds, services[0].kill, both_ready, services[0].start)
        rows["Redis master"] = row(load, seconds, kill_master, lambda: True, None)
        rows["vector store"] = row(load, seconds, store.kill, both_ready, store.start)
        rows["engine"] = row(load, seconds, engines[0].kill, lambda: bool(engines[0].seen()), engines[0].start)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options("faults.fleet", __doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load before, during and after each kill")
    chosen = parser.parse_args(arguments)
    rows = measure(chosen.seconds)
    tables = {"fleet": fault_table(rows)}
    print(table([{"kind": "fleet", "tables": tables}]))
    write_study(chosen, "fleet", rows, tables=tables)


if __name__ == "__main__":
    main()
