"""The collection ``notes`` of a tenant, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from tests.support.tenants import Tenants

NOTES = "/v1/collections/notes"


def notes_client(folder: Path, **fields: Any) -> TestClient:
    """Return a client of a tenant with the collection ``notes``."""
    client = Tenants(folder, **fields).client("acme")
    assert client.post("/v1/collections", json={"name": "notes"}).status_code == 201
    return client


def add(client: TestClient, *documents: Any) -> dict[str, Any]:
    response = client.post(f"{NOTES}/documents", json={"documents": list(documents)})
    assert response.status_code == 200, response.text
    return dict(response.json())
