"""Environments as image and chart render them start the real service, up to /readyz."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import httpx2
import pytest

from deployments.ci.image_steps import DOCKERFILE, read_steps, stages_of
from rag_posfix.files import default_cache_dir
from rag_posfix.retrieval.embeddings import SentenceEmbeddings
from tests.deployments.helm_chart import merged, one_of, values_of
from tests.support.tool_models import save_chat_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
READY_SECONDS = 200


def chart_environment():
    return one_of("ConfigMap", values_of("laptop"))["data"]


def image_environment():
    """The variables of the image's target and of the ``docker run`` line in its first comment."""
    text = DOCKERFILE.read_text("utf-8")
    steps = read_steps(text)
    chain = stages_of("cpu", steps)
    settings = " ".join(step.text for step in steps if step.stage in chain and step.instruction == "ENV")
    run = re.search(r"docker run --read-only.*?rag-posfix:\d", text, re.DOTALL)[0]
    return dict(re.findall(r"((?:RAG_POSFIX|HF)_\w+)=(\S+)", settings) + re.findall(r"--env (\w+)=(\S+)", run))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Variables that name a random model, which loads in no time; the chart's own is loaded once."""
    model = save_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    return {"RAG_POSFIX_MODEL": str(model), "RAG_POSFIX_CACHE_DIR": str(default_cache_dir())}


def start(python, environment, folder, **changes):
    """Start the service with its paths below a folder and a free port, as no container gives them."""
    paths = {"/cache": str(folder / "cache"), "/data": str(folder / "data"), "/tmp": str(folder)}
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RAG_POSFIX")}
    variables |= {key: paths.get(value, value) for key, value in environment.items() if key != "HOME"} | changes
    variables["RAG_POSFIX_SERVICE_PORT"] = "0"
    if "RAG_POSFIX_SERVICE_METRICS_ADDRESS" in variables:
        variables["RAG_POSFIX_SERVICE_METRICS_ADDRESS"] = "127.0.0.1:0"
    command = ("-m", "rag_posfix.cli.main", "serve", "--log-format", "text")
    log = folder / "log"
    process = python.start(ROOT, *command, output=log, environment=variables)
    return process, log


def wait_for(process, log, pattern):
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        match = re.search(pattern, log.read_text())
        if match or process.poll() is not None:
            return match
        time.sleep(0.2)
    return None


@pytest.mark.weights
@pytest.mark.parametrize("environment", [chart_environment, image_environment], ids=["chart", "image"])
def test_the_service_starts_without_a_key_where_that_is_said_and_warns(environment, tmp_path, python, small_model):
    changes = small_model if environment is image_environment else {"RAG_POSFIX_CACHE_DIR": str(default_cache_dir())}
    process, log = start(python, environment(), tmp_path, **changes)
    try:
        assert wait_for(process, log, "ready: "), log.read_text()
        address = re.search(r"listening on http://0\.0\.0\.0:(\d+)", log.read_text())[1]
        assert httpx2.get(f"http://127.0.0.1:{address}/readyz", timeout=60).status_code == 200
        assert "no API key is needed" in log.read_text()
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.weights
def test_the_service_starts_with_vector_stores_and_answers_from_them(tmp_path, python, small_model):
    """Qdrant in its local mode, one folder for each process that opens it."""
    from langchain_qdrant import QdrantVectorStore

    stores = {}
    for name in ("retriever", "collectionStore"):
        texts = ["The bridge of Arvo was built in 1911."]
        QdrantVectorStore.from_texts(
            texts, SentenceEmbeddings(), path=str(tmp_path / name), collection_name="docs"
        ).client.close()
        stores[name] = f"qdrant:path={tmp_path / name},collection=docs"
    environment = one_of("ConfigMap", merged(values_of("laptop"), {"retrieval": stores}))["data"]
    process, log = start(python, environment, tmp_path, **small_model)
    try:
        assert wait_for(process, log, "ready: "), log.read_text()
        port = re.search(r"listening on http://0\.0\.0\.0:(\d+)", log.read_text())[1]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/readyz").status_code == 200
            body = {"messages": [{"role": "user", "content": "When was the bridge of Arvo built?"}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert [document["text"] for document in answer["documents"]] == texts
            assert client.post("/v1/collections", json={"name": "notes"}).status_code == 201
            added = client.post(
                "/v1/collections/notes/documents", json={"documents": [{"id": "a", "text": "A ferry."}]}
            )
            assert added.json()["added"] == 1
            (hit,) = client.post("/v1/collections/notes/search", json={"query": "ferry"}).json()["data"]
            assert hit["id"] == "a"
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.weights
def test_the_index_job_writes_what_the_service_answers_from(tmp_path, python, small_model):
    values = merged(values_of("laptop"), {"index": {"size": "1Gi"}, "indexJob": {"enabled": True}})
    (job,) = one_of("Job", values)["spec"]["template"]["spec"]["containers"]
    environment = one_of("ConfigMap", values)["data"]
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "bridge.md").write_text("# Bridges\n\nThe bridge of Arvo was built in 1911.\n")
    paths = {"/documents": str(tmp_path / "documents"), "/index": str(tmp_path / "index")}
    command = ("-m", "rag_posfix.cli.main", *job["command"][1:], *(paths.get(each, each) for each in job["args"]))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAG_POSFIX")}
    variables = (
        inherited | environment | {"RAG_POSFIX_CACHE_DIR": str(default_cache_dir()), "HOME": os.environ["HOME"]}
    )
    python.run(ROOT, *command, environment=variables)
    process, log = start(python, environment, tmp_path, RAG_POSFIX_INDEX=paths["/index"], **small_model)
    try:
        assert wait_for(process, log, "ready: "), log.read_text()
        port = re.search(r"listening on http://0\.0\.0\.0:(\d+)", log.read_text())[1]
        body = {"messages": [{"role": "user", "content": "When was the bridge of Arvo built?"}], "max_tokens": 8}
        answer = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
        assert "1911" in answer["documents"][0]["text"]
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


@pytest.mark.weights
def test_the_service_is_not_ready_without_the_vector_store_that_it_should_use(tmp_path, python, small_model):
    store = f"qdrant:path={tmp_path / 'empty'},collection=docs"
    values = merged(values_of("laptop"), {"retrieval": {"collectionStore": store}})
    process, log = start(python, one_of("ConfigMap", values)["data"], tmp_path, **small_model)
    try:
        assert wait_for(
            process, log, "the model could not be loaded: collection_store: the vector store qdrant failed"
        ), log.read_text()
        assert "ready: " not in log.read_text()
    finally:
        process.kill()
        process.wait(timeout=60)


def test_without_the_decision_the_service_does_not_start(tmp_path, python):
    environment = chart_environment() | {"RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS": "false"}
    process, log = start(python, environment, tmp_path)
    assert process.wait(timeout=120) == 1
    assert "RAG_POSFIX_SERVICE_ALLOW_ANONYMOUS=true" in log.read_text()
