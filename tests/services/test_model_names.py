"""The name of the served model: no response shows the folder that it was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import BRIDGE, CHAT, WordReranker, chat, limits, make_pipeline
from tests.support.toy_encoder import ToyEncoder

SECRET_PLACE = "/srv/customers/acme"
FOLDER = f"{SECRET_PLACE}/llama-tuned"
VECTORS = f"{SECRET_PLACE}/vectors"


class FromFolder(FakeGenerator):
    model_id = FOLDER


def client(folder: Path, **fields: Any) -> TestClient:
    pipeline = make_pipeline(FromFolder(ToyEncoder()), embeddings=LetterEmbeddings(), reranker=WordReranker())
    settings = Settings(model=FOLDER, embedding_model=VECTORS)
    return TestClient(create_app(settings, pipeline, limits(data_dir=folder, **fields)))


def every_response(asked: TestClient, model: str) -> list[Any]:
    """Responses of all routes that name a model."""
    question = [{"role": "user", "content": "When was the bridge built?"}]
    shared = {"model": model, "documents": [BRIDGE]}
    found = [asked.get(path) for path in ("/v1/models", "/info", "/api/tags")]
    for path, body in {
        CHAT: chat(**shared),
        "/v1/completions": {"model": model, "prompt": "The"},
        "/v1/responses": {"model": model, "input": "When?", "documents": [BRIDGE]},
        "/v1/messages": {"model": model, "messages": question, "max_tokens": 9},
        "/v2/chat": {**shared, "messages": question},
        "/v1/embeddings": {"model": "default", "input": "a"},
        "/v1/rerank": {"query": "a", "documents": [BRIDGE]},
        "/score": {"text_1": "a", "text_2": [BRIDGE]},
    }.items():
        found.append(asked.post(path, json=body))
    found.append(asked.post(CHAT, json=chat(**{**shared, "stream": True})))
    return found


def test_a_folder_is_shown_by_its_last_name(tmp_path: Path):
    asked = client(tmp_path)
    for response in every_response(asked, "llama-tuned"):
        assert response.status_code in (200, 400), response.text  # this pipeline has no retriever
        assert SECRET_PLACE not in response.text, response.url
    assert asked.get("/v1/models").json()["data"][0]["id"] == "llama-tuned"
    assert asked.get("/info").json()["model"]["id"] == "llama-tuned"
    assert asked.get("/api/tags").json()["models"][0]["name"] == "llama-tuned"
    assert asked.post("/v1/embeddings", json={"model": "vectors", "input": "a"}).json()["model"] == "vectors"
    assert 'model="llama-tuned"' in asked.get("/metrics").text
    refused = asked.post(CHAT, json=chat(model="gpt"))
    assert refused.status_code == 404
    assert "'llama-tuned'" in refused.text
    assert SECRET_PLACE not in refused.text


@pytest.mark.parametrize("name", ["support-bot", FOLDER, "default"])
def test_a_model_has_the_name_that_the_settings_give_it_and_its_own(tmp_path: Path, name: str):
    asked = client(tmp_path, served_model_name="support-bot")
    answer = asked.post(CHAT, json=chat(model=name, documents=[BRIDGE]))
    assert answer.json()["model"] == "support-bot"
    assert asked.get(f"/v1/models/{name}").json()["id"] == "support-bot"
    assert asked.post(CHAT, json=chat(model="llama-tuned")).status_code == 404
