"""The part of ``with_ray`` about Ray Serve: two replicas without weights, one of them killed, and ``serve deploy``.

Replicas write a line for each request into a file named after their process.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import yaml

from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import Chunk, GenerationRequest
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.settings import Settings
from rag_posfix_api.ray_serve.application import ApplicationOptions, ModelParts, make_application
from rag_posfix_api.ray_serve.routing import ReplicaModel
from tests.support.redis_server import free_port
from tests.support.serving import serving
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SLOWLY = "slowly"
SETTINGS = {"cache": {"enabled": False}}


def passages_of(stations: range) -> list[str]:
    """Passages of which no two are equal."""
    told = "Station {} of the northern line stands {} kilometres from the sea. "
    return [told.format(n, n * 7) + "The line is old and slow. " * 6 for n in stations]


POOL = passages_of(range(24))
SETS = [passages_of(range(8 * n, 8 * n + 8)) for n in range(16)]
"""Each set goes to one of two replicas by a hash of the replica's random name: all 16 to one in 1 of 32,768 runs."""


class LoggingGenerator(FakeGenerator):
    """Notes each request in a file of its process, and takes its time for each word if the folder says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ToyEncoder(), 16384)
        self._folder = folder
        self._log = folder / f"{os.getpid()}.log"
        self._log.touch()

    def stream(self, request: GenerationRequest) -> Iterator[Chunk]:
        with self._log.open("a") as log:
            log.write(json.dumps(request.layout.keys) + "\n")
        slowly = (self._folder / SLOWLY).exists()
        for chunk in super().stream(request):
            time.sleep(0.05 if slowly else 0.0)
            yield chunk


def load(folder: Path, _: Settings) -> ReplicaModel:
    folder.mkdir(exist_ok=True)
    return ReplicaModel(LoggingGenerator(folder))


def describe(_: Settings) -> Generator:
    return FakeGenerator(ToyEncoder(), 16384)


@contextmanager
def served(folder: Path, url: str, **options: Any) -> Iterator[Path]:
    """Run the application with two replicas; yield the folder of their logs."""
    from ray import serve

    chosen = ApplicationOptions(
        settings=SETTINGS, service={"max_concurrent": 4}, min_replicas=2, max_replicas=2, replica_cpus=0.5,
        ingress_cpus=0.1, allow_anonymous=True, sketch_seconds=0.5, **options,
    )  # fmt: skip
    serve.run(make_application(chosen, ModelParts(partial(load, folder), describe)), name="test")
    try:
        wait_until(lambda: is_ready(url), 60)
        yield folder
    finally:
        serve.delete("test")


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(url + "/readyz", timeout=30).status_code == 200
    except httpx2.TransportError:  # it starts, on a busy machine
        return False


def body(question: str, passages: Sequence[str], **fields: Any) -> dict[str, Any]:
    documents = [{"text": text, "score": 1 / (1 + place)} for place, text in enumerate(passages)]
    return {"model": "default", "messages": [{"role": "user", "content": question}], "documents": documents, **fields}


def ask(url: str, question: str, passages: Sequence[str]) -> dict[str, Any]:
    response = httpx2.post(url + "/v1/chat/completions", json=body(question, passages), timeout=60)
    return {"status": response.status_code, **response.json()}


def streamed(url: str, question: str, passages: Sequence[str]) -> dict[str, Any]:
    asked = body(question, passages, stream=True)
    text = ""
    with httpx2.stream("POST", url + "/v1/chat/completions", json=asked, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    return {"status": 500, "text": str(piece["error"])}
                text += "".join(one["delta"].get("content") or "" for one in piece["choices"])
    return {"status": response.status_code, "text": text}


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"] if "choices" in answer else str(answer)


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one call to the next."""
    return {name: answer[name] for name in ("status", "object", "model", "choices", "usage") if name in answer}


def by_process(folder: Path) -> dict[str, list[str]]:
    return {one.stem: one.read_text().splitlines() for one in sorted(folder.glob("*.log"))}


def answering(folder: Path) -> str:
    """Return a process that began to answer a moment ago."""
    name, lines = "", by_process(folder)
    while not name:
        time.sleep(0.02)
        began = {one: found for one, found in by_process(folder).items() if len(found) > len(lines[one])}
        name = next(iter(began), "")
    return name


def answered_by(folder: Path, do: Callable[[], Any]) -> str:
    """Return which process answered while ``do`` ran."""
    before = {name: len(lines) for name, lines in by_process(folder).items()}
    do()
    (changed,) = [name for name, lines in by_process(folder).items() if len(lines) > before[name]]
    return changed


def shuffles(url: str, folder: Path) -> dict[str, list[str]]:
    """Ask about each set of passages, then about shuffled parts of each; return who answered, by set."""
    rng = random.Random(3)
    first = [answered_by(folder, partial(ask, url, "Which station?", passages)) for passages in SETS]
    time.sleep(3)  # until the routers have the sketches
    return {
        f"set {number}": [
            first[number],
            *(
                answered_by(folder, partial(ask, url, f"Which station, {n}?", rng.sample(passages, 6)))
                for n in range(3)
            ),
        ]
        for number, passages in enumerate(SETS)
    }


def plain_answers(questions: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    from rag_posfix.pipeline.build import build_pipeline  # torch, which the ingress does without

    pipeline = build_pipeline(Settings(**SETTINGS), generator=describe(Settings()))
    with serving(pipeline) as url:
        return [said(ask(url, *one)) for one in questions]


def killed_under_load(url: str, folder: Path, most: int = 24) -> dict[str, Any]:
    """Kill a replica that is answering while six clients ask; return the failures, and how many asked again."""
    (folder / SLOWLY).touch()
    before = sum(map(len, by_process(folder).values()))
    rng = random.Random(5)
    asked = [(f"Where is station {n % 24}?", rng.sample(POOL, 5)) for n in range(most)]
    answers: dict[int, Any] = {}
    left = iter(range(most))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            how = streamed if number % 2 else ask
            answers[number] = how(url, *asked[number])

    clients = [threading.Thread(target=client) for _ in range(6)]
    for one in clients:
        one.start()
    wait_until(lambda: len(answers) >= 8, 60)
    os.kill(int(answering(folder)), signal.SIGKILL)
    for one in clients:
        one.join(120)
    expected = plain_answers(asked)
    texts = [answers[n]["text"] if n % 2 else text_of(answers[n]) for n in range(most)]
    return {
        "asked": most,
        "failed": [answers[n] for n in range(most) if answers[n]["status"] != 200],
        "different": [n for n in range(most) if texts[n] != text_of(expected[n])],
        "repeated": sum(map(len, by_process(folder).values())) - before - most,
    }


def deployable(args: Mapping[str, Any]) -> Any:
    """What ``import_path`` names: the application with a model without weights."""
    folder = Path(os.environ["SERVED_FOLDER"])
    return make_application(ApplicationOptions(**args), ModelParts(partial(load, folder), describe))


def deployed(folder: Path, url: str, dashboard: str) -> dict[str, Any]:
    """Run the documented ``serve deploy`` with the shipped file, whose model and ports are of this test; ask once."""
    configuration = yaml.safe_load((ROOT / "deployments" / "ray" / "serve.yaml").read_text())
    configuration["http_options"] |= {"host": "127.0.0.1", "port": int(url.rpartition(":")[2])}
    (app,) = configuration["applications"]
    app["import_path"] = f"{__name__}:deployable"
    app["runtime_env"]["env_vars"] |= {"SERVED_FOLDER": str(folder), "RAG_POSFIX_SERVICE_API_KEY": "key"}
    app["args"] |= {"settings": SETTINGS, "replica_cpus": 0.5, "ingress_cpus": 0.1}
    (folder.parent / "serve.yaml").write_text(yaml.safe_dump(configuration))
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(folder.parent / "serve.yaml")]
    environment = dict(os.environ, RAY_DASHBOARD_ADDRESS=f"http://{dashboard}")
    without = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}
    refused = subprocess.run(command, env=without, capture_output=True, text=True, timeout=120, check=False)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    headers = {"authorization": "Bearer key"}
    wait_until(lambda: is_ready(url), 240)
    asked = body("Where is station 3?", POOL[:6])
    route = url + "/v1/chat/completions"
    codes = [httpx2.post(route, json=asked, headers=each, timeout=60).status_code for each in ({}, headers)]
    return {
        "refused": refused.returncode, "returncode": done.returncode, "output": done.stdout + done.stderr,
        "codes": codes,
    }  # fmt: skip


def replica_gauges() -> dict[str, float]:
    """Return the gauges of the replicas, as Prometheus scrapes them from the node, by name; the sum over replicas."""
    import ray

    (node,) = ray.nodes()
    text = httpx2.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=30).text
    gauges: dict[str, float] = {}
    for name, labels, value in re.findall(r"^ray_rag_posfix_replica_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        assert 'deployment="Model"' in labels, labels
        gauges[name] = gauges.get(name, 0.0) + float(value)
    return gauges


def gauges_once_idle(seconds: float = 60) -> dict[str, float]:
    """Return the gauges once they say that no request is being answered; replicas export them now and then."""
    deadline = time.monotonic() + seconds
    while (gauges := replica_gauges()).get("in_flight_requests") != 0 and time.monotonic() < deadline:
        time.sleep(0.5)
    return gauges


def serve_results(folder: Path, dashboard: str) -> dict[str, Any]:
    """Return what was found on the cluster that this process is connected to."""
    from ray import serve

    folder.mkdir(exist_ok=True)
    port = int(free_port())
    url = f"http://127.0.0.1:{port}"
    found: dict[str, Any] = {}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        questions = [("Where is station 3?", POOL[:6]), ("Where is station 20?", POOL[16:][::-1])]
        with served(folder / "overlap", url, router_options={"remembered_seconds": 0}) as logs:
            found["equal"] = [[said(ask(url, *one)) for one in questions], plain_answers(questions)]
            found["refused"] = httpx2.post(url + "/v1/chat/completions", json={"model": "x"}, timeout=60).status_code
            found["overlap"] = shuffles(url, logs)
            found["gauges"] = gauges_once_idle()
            found["killed"] = killed_under_load(url, logs)
        found["deployed"] = deployed(folder / "deployed", url, dashboard)
    finally:
        serve.shutdown()
    return found
