"""Metrics that name tenants: who may read them, and what they say of each tenant."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Gauge

from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix_api.http.metrics import ANSWER, SCORE
from rag_posfix_api.keys.store import KeyStore
from rag_posfix_api.runtime.admission import Admission, Ticket
from rag_posfix_api.server import serve_metrics
from tests.services.notes import NOTES, add, notes_client
from tests.support.redis_server import free_port
from tests.support.serving import BRIDGE, CHAT, chat, client_for
from tests.support.tenants import pipeline_with_embeddings
from tests.support.toy_encoder import ToyEncoder
from tests.support.waiting import wait_until


def key_of(folder: Path, tenant: str, *scopes: str) -> dict[str, str]:
    _, key = KeyStore(folder).create(tenant, scopes=scopes or ("read",))
    return {"x-api-key": key}


def samples(text: str, name: str) -> dict[str, float]:
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)}


def test_metrics_need_a_key_with_their_scope_once_there_is_a_key(tmp_path: Path):
    client = client_for(data_dir=tmp_path)
    assert client.get("/metrics").status_code == 200, "a service without keys is bound to loopback"
    reader, monitor = key_of(tmp_path, "acme"), key_of(tmp_path, "ops", "metrics")
    assert client.get("/metrics").status_code == 401
    refused = client.get("/metrics", headers=reader)
    assert refused.status_code == 403
    assert "lacks the scope 'metrics'" in refused.json()["error"]["message"]
    assert client.get("/metrics", headers=monitor).status_code == 200
    assert client.post(CHAT, json=chat(documents=[BRIDGE]), headers=monitor).status_code == 403, "and nothing else"


def test_metrics_count_each_configured_tenant_and_no_other(tmp_path: Path):
    client = client_for(data_dir=tmp_path)
    acme, umbrella, monitor = (
        key_of(tmp_path, "acme"), key_of(tmp_path, "umbrella"), key_of(tmp_path, "ops", "metrics"),
    )  # fmt: skip
    for _ in range(2):
        assert client.post(CHAT, json=chat(documents=[BRIDGE]), headers=acme).status_code == 200
    assert client.post(CHAT, json=chat(messages=[]), headers=umbrella).status_code == 422
    client.post(CHAT, json=chat(), headers={"x-api-key": "rpk_nobody_secret"})
    text = client.get("/metrics", headers=monitor).text
    requests = samples(text, "rag_posfix_tenant_requests_total")
    assert requests == {
        'code="ok",tenant="acme"': 2.0, 'code="invalid_request",tenant="umbrella"': 1.0,
        'code="invalid_api_key",tenant=""': 1.0,
    }  # fmt: skip
    tokens = samples(text, "rag_posfix_tenant_tokens_total")
    assert tokens['kind="completion",tenant="acme"'] == 2 * 8
    assert not any("umbrella" in labels for labels in tokens)
    seconds = samples(text, "rag_posfix_tenant_model_seconds_total")
    assert list(seconds) == [f'tenant="acme",work="{ANSWER}"']
    assert seconds[f'tenant="acme",work="{ANSWER}"'] > 0


def test_requests_that_run_together_share_the_time_of_the_model(monkeypatch: pytest.MonkeyPatch):
    now, released = [100.0], list[tuple[str, float]]()
    monkeypatch.setattr("rag_posfix_api.runtime.admission.time.monotonic", lambda: now[0])
    admission = Admission(2, 2, 60, on_release=lambda ticket: released.append((ticket.tenant, ticket.model_seconds)))
    with admission.admit(600) as first, admission.admit(600) as second:
        first.tenant, second.tenant = "acme", "umbrella"

        def after(seconds: float, step: Any, ticket: Ticket) -> None:
            now[0] += seconds
            step(ticket)

        after(0, admission.acquire, first)
        after(4, admission.acquire, second)  # first alone for 4 s
        after(2, admission.release, first)  # both for 2 s
        after(3, admission.release, second)  # second alone for 3 s
    assert released == [("acme", 5.0), ("umbrella", 4.0)]
    assert sum(seconds for _, seconds in released) == 9.0, "the time in which the model worked"


class Precomputing(FakeGenerator):
    """Finds every passage in its store already."""

    capabilities = frozenset({"precompute"})
    kv_bytes_per_token = 1

    def __init__(self, passages: PassageStore) -> None:
        super().__init__(ToyEncoder())
        self.passages = passages

    def precompute(self, *arguments: object) -> int:
        return 0


def test_precomputing_a_collection_is_charged_to_its_tenant(tmp_path: Path):
    with closing(PassageStore([MemoryTier()])) as store:
        client = notes_client(tmp_path, pipeline=pipeline_with_embeddings(generator=Precomputing(store)))
        add(client, {"text": BRIDGE})
        assert client.post(f"{NOTES}/precompute", json={"mitigation": "parallel_windows"}).status_code == 202
        wait_until(lambda: client.get(f"{NOTES}/precompute").json()["status"] == "done")
        text = TestClient(client.app, headers=key_of(tmp_path, "ops", "metrics")).get("/metrics").text
    seconds = samples(text, "rag_posfix_tenant_model_seconds_total")
    # The vectors of its documents count as scores.
    assert set(seconds) == {f'tenant="acme",work="{work}"' for work in (ANSWER, SCORE)}


def test_an_address_of_its_own_serves_metrics_without_a_key():
    registry, port = CollectorRegistry(), free_port()
    Gauge("rag_posfix_answer", "Of a test.", registry=registry).set(42)
    with serve_metrics(f"127.0.0.1:{port}", registry):
        assert "rag_posfix_answer 42.0" in httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
        taken = serve_metrics(f"127.0.0.1:{port}", registry)
        with pytest.raises(ConfigError, match=f"metrics_address='127.0.0.1:{port}' cannot be listened on"), taken:
            pass
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=60)
    with serve_metrics(None, registry):
        pass


@pytest.mark.slow
def test_the_document_asks_for_the_key_so_that_its_page_can_send_one():
    client: TestClient = client_for(api_key="key")
    document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["security"] == [{"key": []}, {}]
