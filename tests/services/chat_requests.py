"""Chat completions of the service: a question asked, one that is refused, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

from rag_posfix.pipeline.pipeline import Pipeline
from tests.support.serving import QUESTION, chat, client_for

URL = "/v1/chat/completions"


def ask(pipeline: Pipeline | None = None, question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    response = client_for(pipeline).post(URL, json=chat(question, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


def refused(pipeline: Pipeline | None = None, **fields: Any) -> tuple[int, dict[str, Any]]:
    response = client_for(pipeline).post(URL, json={**chat(), **fields})
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
