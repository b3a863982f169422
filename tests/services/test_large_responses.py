"""Responses that are large, and clients that do not read them."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.support.serving import in_flight, serving
from tests.support.tenants import Tenants, pipeline_with_embeddings
from tests.support.waiting import wait_until

SEARCH = "/v1/collections/notes/search"


JSON = {"content-type": "application/json"}


def documents(start: int, stop: int, metadata_characters: int) -> bytes:
    """The body that adds documents whose metadata has characters of four bytes."""
    note = "\N{GRINNING FACE}" * metadata_characters
    entries = [{"id": f"d{n}", "text": "text", "metadata": {"note": note}} for n in range(start, stop)]
    return json.dumps({"documents": entries}, ensure_ascii=False).encode()


def test_a_search_response_is_bounded_and_the_error_names_a_k_that_fits(tmp_path: Path):
    client = Tenants(tmp_path, max_body_bytes=40_000).client("acme")
    assert client.post("/v1/collections", json={"name": "notes"}).status_code == 201
    # A document is 4,000 bytes of metadata and about 90 more: 9 of them fit into 40,000, 18 do not.
    for start in (0, 9):
        body = documents(start, start + 9, 1000)
        assert client.post("/v1/collections/notes/documents", content=body, headers=JSON).status_code == 200
    refused = client.post(SEARCH, json={"query": "text", "k": 1000})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (413, "response_too_large", "k")
    assert "k=9 or less" in error["message"]
    response = client.post(SEARCH, json={"query": "text", "k": 9}).json()
    assert response["object"] == "list"
    assert [list(hit) for hit in response["data"]] == [["id", "text", "title", "metadata", "score"]] * 9


def test_responses_that_nobody_reads_are_in_flight_and_bounded_for_each_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rag_posfix_api.runtime.service.MAX_UNREAD", 2)
    query = b'{"query": "text", "k": 38}'
    lines = (f"POST {SEARCH} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(query)}")
    with serving(pipeline_with_embeddings(), data_dir=tmp_path) as url, ExitStack() as stack:

        def post(path: str, body: bytes) -> httpx2.Response:
            return httpx2.post(url + path, content=body, headers=JSON, timeout=60)

        assert post("/v1/collections", b'{"name": "notes"}').status_code == 201
        # 38 * 4 * 49,000 bytes: 7.4 MB, of which the sockets buffer a part.
        assert post("/v1/collections/notes/documents", documents(0, 38, 49_000)).status_code == 200
        unread = [stack.enter_context(socket.socket()) for _ in range(2)]
        for connection in unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", urlsplit(url).port))
            connection.sendall("\r\n".join((*lines, "", "")).encode() + query)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert in_flight(url) == 2
        refused = post(SEARCH, query)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        unread[0].close()
        wait_until(lambda: in_flight(url) == 1)
        assert len(post(SEARCH, query).content) > 7_000_000
