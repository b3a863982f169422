"""The page at /docs over HTTP: nothing of it comes from another host."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from rag_posfix_api.page import routes
from tests.support.serving import client_for


@pytest.fixture
def client() -> TestClient:
    return client_for()


def test_the_page_and_its_files_name_no_other_host(client: TestClient):
    html = client.get("/docs")
    assert html.status_code == 200
    named = re.findall(r'(?:src|href)="([^"]+)"', html.text)
    assert sorted(named) == ["data:,", "docs/swagger-ui-bundle.js", "docs/swagger-ui.css", "page/api-docs.js"]
    assert "//" not in html.text.replace("<!doctype html>", "")
    for name in named[1:]:
        assert client.get(f"/{name}").status_code == 200, name
    assert "http" not in "".join(re.findall(r"url\(([^)]{1,12})", client.get("/docs/swagger-ui.css").text))
    assert re.findall("https?://", client.get("/page/api-docs.js").text) == []
    policy = html.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'", "img-src 'self' data:"} <= set(policy)


def test_there_are_no_pages_that_load_from_a_network(client: TestClient):
    for path in ("/redoc", "/docs/oauth2-redirect", "/docs/..%2fcore.py", "/docs/nothing.js"):
        response = client.get(path)
        assert response.status_code == 404, path
        assert "cdn" not in response.text


def test_without_its_package_the_page_says_what_to_install(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "find_spec", lambda name: None)
    for path in ("/docs", "/docs/swagger-ui.css"):
        response = client.get(path)
        assert response.status_code == 404
        assert "pip install '.[server]'" in response.text
