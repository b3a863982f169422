"""MCP at /mcp of a running service: the SDK's client in both of its protocols, with keys, quotas and collections."""

from contextlib import asynccontextmanager

import anyio
import httpx2
import pytest
from langchain_core.documents import Document
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from rag_posfix.caching.answers.tiered import TieredAnswerCache
from rag_posfix.caching.tier import MemoryTier
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix_api.keys.store import KeyStore
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import (
    ANSWER,
    BRIDGE,
    HARBOUR,
    QUESTION,
    EndlessGenerator,
    ListRetriever,
    client_for,
    connected,
    make_pipeline,
    noticed_leaving,
    request_of,
    serving,
)
from tests.support.waiting import wait_until

DOCUMENTS = [
    Document(BRIDGE, id="bridge", metadata={"title": "Bridges", "tenant": "a"}),
    Document(HARBOUR, id="harbour", metadata={"title": "Ice", "tenant": "b"}),
]
HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
MODES = ["auto", "legacy"]


def pipeline(**parts):
    cache = TieredAnswerCache([MemoryTier(max_entries=100)])
    retriever = BM25Retriever.from_documents(DOCUMENTS)
    return make_pipeline(**{"retriever": retriever, "embeddings": LetterEmbeddings(), "cache": cache, **parts})


@asynccontextmanager
async def agent(url, key=None, mode="auto"):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url + "/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.fixture
def keys(tmp_path):
    return KeyStore(tmp_path / "data")


@pytest.mark.parametrize("mode", MODES)
async def test_the_tools_answer_over_http(mode):
    with serving(pipeline()) as url:
        async with agent(url, mode=mode) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools["ask"].input_schema["properties"]) == {"question", "k", "filter", "collection"}
            answer = (await client.call_tool("ask", {"question": QUESTION, "k": 1})).structured_content
            assert answer["answer"].startswith(ANSWER)
            assert [source["id"] for source in answer["sources"]] == ["bridge"]
            (contents,) = (await client.read_resource(answer["sources"][0]["uri"])).contents
            assert contents.text == BRIDGE
        metrics = httpx2.get(url + "/metrics", timeout=60).text
    assert 'route="/mcp"' in metrics
    assert 'dialect="mcp"' in metrics


@pytest.mark.parametrize("mode", MODES)
async def test_each_key_reads_the_passages_of_its_tenant_alone(keys, mode):
    secrets = {tenant: keys.create(tenant, scopes=("read",))[1] for tenant in ("a", "b")}
    with serving(pipeline(), data_dir=keys.folder, tenant_field="tenant") as url:
        for tenant, own, other in (("a", "bridge", "harbour"), ("b", "harbour", "bridge")):
            async with agent(url, secrets[tenant], mode) as client:
                found = await client.call_tool("search", {"query": "bridge harbour"})
                assert [passage["id"] for passage in found.structured_content["passages"]] == [own]
                with pytest.raises(MCPError, match="no passage has the address"):
                    await client.read_resource(f"rag-posfix://passages/{other}")


async def test_a_collection_of_the_tenant_is_searched_asked_and_read(keys):
    secrets = {tenant: keys.create(tenant, scopes=("read", "write"))[1] for tenant in ("a", "b")}
    with serving(pipeline(), data_dir=keys.folder) as url:
        headers = {"authorization": f"Bearer {secrets['a']}"}
        httpx2.post(url + "/v1/collections", json={"name": "notes"}, headers=headers, timeout=60).raise_for_status()
        body = {"documents": [{"id": "n1", "text": "The mill of Orva was built in 1870."}]}
        httpx2.post(url + "/v1/collections/notes/documents", json=body, headers=headers, timeout=60).raise_for_status()
        async with agent(url, secrets["a"]) as client:
            found = await client.call_tool("search", {"query": "mill", "collection": "notes"})
            (passage,) = found.structured_content["passages"]
            assert passage["uri"] == "rag-posfix://collections/notes/n1"
            (contents,) = (await client.read_resource(passage["uri"])).contents
            assert contents.text == "The mill of Orva was built in 1870."
            answer = await client.call_tool("ask", {"question": "When was the mill built?", "collection": "notes"})
            assert [source["id"] for source in answer.structured_content["sources"]] == ["n1"]
            both = await client.call_tool("search", {"query": "mill", "collection": "notes", "index": "x"})
            assert both.is_error
        async with agent(url, secrets["b"]) as client:
            hidden = await client.call_tool("search", {"query": "mill", "collection": "notes"})
            assert (hidden.is_error, "notes" in hidden.content[0].text) == (True, True)


def test_a_missing_wrong_or_scopeless_key_is_refused_before_the_message_is_read(keys):
    keys.create("a")
    metrics_only = keys.create("a", scopes=("metrics",))[1]
    with serving(pipeline(), data_dir=keys.folder) as url:
        for key, status in ((None, 401), ("rpx-wrong", 401), (metrics_only, 403)):
            sent = HEADERS | ({} if key is None else {"authorization": f"Bearer {key}"})
            assert httpx2.post(url + "/mcp", json=LIST, headers=sent, timeout=60).status_code == status


def test_messages_count_against_the_quota_of_a_key(keys):
    key = keys.create("a", scopes=("read",), requests_per_minute=2)[1]
    with serving(pipeline(), data_dir=keys.folder) as url:
        sent = HEADERS | {"authorization": f"Bearer {key}"}
        statuses = [httpx2.post(url + "/mcp", json=LIST, headers=sent, timeout=60).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


def test_where_the_operator_keeps_the_text_no_tool_and_no_resource_has_it():
    with serving(pipeline(), source_text=False) as url:

        async def ask():
            async with agent(url) as client:
                found = await client.call_tool("search", {"query": "bridge"})
                (passage, *_) = found.structured_content["passages"]
                assert (passage["text"], BRIDGE in found.content[0].text) == (None, False)
                with pytest.raises(MCPError, match="does not give the text of passages"):
                    await client.read_resource(passage["uri"])

        anyio.run(ask)


def test_an_answer_stops_when_its_client_leaves(monkeypatch):
    generator = EndlessGenerator()
    noticed = noticed_leaving(monkeypatch)
    with serving(make_pipeline(generator, retriever=ListRetriever(BRIDGE))) as url:
        call = {"name": "ask", "arguments": {"question": QUESTION}}
        message = request_of("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call})
        with connected(url) as connection:
            connection.sendall(message.replace(b"Host:", f"Accept: {HEADERS['accept']}\r\nHost:".encode()))
            wait_until(generator.entered.is_set)
        wait_until(noticed.is_set)
        wait_until(generator.closed.is_set)


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[" * 70 + b"]" * 70, 413), (b'{"jsonrpc": "2.0"}', 400), (b"", 400)]
)
def test_a_body_that_is_no_message_is_refused(body, status):
    with client_for(pipeline()) as client:
        assert client.post("/mcp", content=body, headers=HEADERS).status_code == status


def test_without_the_sdk_a_message_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("rag_posfix_api.dialects.mcp.find_spec", lambda name: None)
    with client_for(pipeline()) as client:
        response = client.post("/mcp", json=LIST, headers=HEADERS)
    assert response.status_code == 400
    assert "mcp is not installed; in a copy of the repository run: pip install '.[mcp]'" in response.text


def test_only_post_is_answered():
    with client_for(pipeline()) as client:
        assert [client.request(method, "/mcp").status_code for method in ("GET", "DELETE")] == [405, 405]
