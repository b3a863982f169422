"""A service with tenants: keys of two of them, embeddings without weights, and a client for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.settings import Settings
from rag_posfix_api.app import create_app
from rag_posfix_api.keys.store import KeyStore
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import limits, make_pipeline


def pipeline_with_embeddings(**parts: Any) -> Pipeline:
    """A pipeline whose collections can be searched; answers are cached."""
    return make_pipeline(
        **{"embeddings": LetterEmbeddings(), "cache": TieredAnswerCache([MemoryTier(max_entries=100)]), **parts}
    )


class Tenants:
    """An app in this process and the key file that it reads.

    Args:
        folder: The data folder.
        pipeline: What is served.
        fields: Settings of the service.
    """

    def __init__(self, folder: Path, pipeline: Pipeline | None = None, **fields: Any) -> None:
        self.keys = KeyStore(folder)
        self.pipeline = pipeline or pipeline_with_embeddings()
        self.app = create_app(Settings(), self.pipeline, limits(data_dir=folder, **fields))
        self.made: dict[str, str] = {}

    def client(self, tenant: str, **fields: Any) -> TestClient:
        """Return a client with a new key of the tenant."""
        fields = {"scopes": ("read", "write"), **fields}
        key, whole = self.keys.create(tenant, **fields)
        self.made[whole] = key.id
        return TestClient(self.app, headers={"authorization": f"Bearer {whole}"})

    def stranger(self, **headers: str) -> TestClient:
        """Return a client without a key."""
        return TestClient(self.app, headers=headers)


def key_of(client: TestClient) -> str:
    """Return the key that a client sends."""
    return str(client.headers["authorization"]).removeprefix("Bearer ")
