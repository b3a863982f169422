"""Bodies as Open WebUI and LibreChat send them: fields that change nothing here are read over, others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.serving import ANSWER, BRIDGE, ListRetriever, client_for, make_pipeline

URL = "/v1/chat/completions"
BODIES = Path(__file__).resolve().parents[1] / "data" / "chat_pages"
OPEN_WEBUI, LIBRECHAT = (
    json.loads((BODIES / f"{page}.json").read_text("utf-8")) for page in ("open_webui", "librechat")
)

TITLE: dict[str, Any] = {
    "model": "fake",
    "stream": False,
    "max_completion_tokens": 1000,
    "messages": [{"role": "user", "content": "### Task:\nGenerate a title.\n<chat_history>USER: Hi</chat_history>"}],
    "metadata": {"task": "title_generation", "task_body": {"model": "fake"}, "chat_id": "c1"},
}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_for(make_pipeline(retriever=ListRetriever(BRIDGE)))


@pytest.mark.parametrize("body", [OPEN_WEBUI, LIBRECHAT], ids=["open-webui", "librechat"])
def test_a_turn_of_the_page_is_answered(client: TestClient, body: dict[str, Any]):
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == ANSWER
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_the_page_gets_a_title(client: TestClient):
    response = client.post(URL, json=TITLE)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"]
