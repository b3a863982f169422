"""The MCP tools, asked by the SDK's own client in this process."""

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from mcp import Client
from mcp.shared.exceptions import MCPError

from rag_posfix.mcp.server import PipelineBackend, build_server
from rag_posfix.retrieval.base import PassageRetriever
from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.hybrid import HybridRetriever
from tests.support.serving import ANSWER, BRIDGE, HARBOUR, QUESTION, make_pipeline

DOCUMENTS = [
    Document(BRIDGE, id="a/b 1", metadata={"title": "Bridges", "source": "bridges.pdf", "page": 3, "year": 1911}),
    Document(HARBOUR, id="harbour", metadata={"title": "Ice", "year": 1963}),
]


def bm25():
    return BM25Retriever.from_documents(DOCUMENTS)


def dense():
    store = FaissVectorStore(DeterministicFakeEmbedding(size=8))
    store.add_documents(DOCUMENTS)
    return PassageRetriever(store=store)


def hybrid():
    return HybridRetriever(retrievers=[dense(), bm25()])


def client(pipeline=None, **parts):
    return Client(build_server(PipelineBackend(pipeline or make_pipeline(**{"retriever": bm25(), **parts})), "1.2"))


async def test_the_server_lists_two_tools_that_only_read_and_whose_schemas_have_the_filter():
    async with client() as agent:
        tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
    assert set(tools) == {"search", "ask"}
    for tool, needed in ((tools["search"], "query"), (tools["ask"], "question")):
        assert tool.input_schema["required"] == [needed]
        assert set(tool.input_schema["properties"]) == {needed, "k", "filter"}, "there is one index, and no collection"
        assert "$gte" in tool.input_schema["properties"]["filter"]["description"]
        assert tool.input_schema["additionalProperties"] is False
        assert tool.annotations.read_only_hint is True
    assert "answer" in tools["ask"].output_schema["properties"]


async def test_search_returns_passages_best_first_with_their_sources():
    async with client() as agent:
        result = await agent.call_tool("search", {"query": "bridge Arvo harbour built", "k": 2})
    assert result.is_error is False
    first, second = result.structured_content["passages"]
    assert {name: first[name] for name in ("id", "title", "source", "page", "text")} == {
        "id": "a/b 1", "title": "Bridges", "source": "bridges.pdf", "page": 3, "text": BRIDGE,
    }  # fmt: skip
    assert first["metadata"]["year"] == 1911
    assert second["id"] == "harbour"
    assert 1 >= first["score"] > second["score"] > 0
    text = result.content[0].text
    assert text.startswith(
        f"[1] Bridges, bridges.pdf, page 3 (rag-posfix://passages/a%2Fb%201)\n{BRIDGE}\n\n[2] Ice ("
    )


async def test_a_filter_leaves_out_passages_of_search_and_ask():
    async with client() as agent:
        found = await agent.call_tool("search", {"query": "bridge harbour", "filter": {"year": {"$gte": 1950}}})
        answer = await agent.call_tool("ask", {"question": QUESTION, "filter": {"year": [1963]}})
        none = await agent.call_tool("search", {"query": "bridge", "filter": {"year": 7}})
    assert [passage["id"] for passage in found.structured_content["passages"]] == ["harbour"]
    assert [source["id"] for source in answer.structured_content["sources"]] in ([], ["harbour"])
    assert none.content[0].text == "no passage was found"


async def test_ask_returns_the_answer_with_its_sources_and_citations():
    async with client() as agent:
        result = await agent.call_tool("ask", {"question": QUESTION, "k": 1})
    answer = result.structured_content
    assert answer["answer"].startswith(ANSWER)
    assert answer["grounded"] is True
    (source,) = answer["sources"]
    assert (source["id"], source["title"], source["page"]) == ("a/b 1", "Bridges", 3)
    assert [(one["passages"], one["pages"]) for one in answer["citations"]] == [(["a/b 1"], [3])]
    assert result.content[0].text.splitlines()[-1] == (
        "[1] Bridges, bridges.pdf, page 3 (rag-posfix://passages/a%2Fb%201)"
    )


async def test_an_answer_without_a_passage_says_so():
    async with client(make_pipeline(retriever=BM25Retriever.from_documents([Document("x y z", id="1")]))) as agent:
        result = await agent.call_tool("ask", {"question": "Who?"})
    assert result.structured_content["grounded"] is False
    assert result.structured_content["sources"] == []


@pytest.mark.parametrize("retriever", [bm25, dense, hybrid])
async def test_the_address_of_a_passage_is_a_resource_with_its_text(retriever):
    async with client(retriever=retriever()) as agent:
        found = await agent.call_tool("search", {"query": "bridge Arvo", "k": 2})
        uris = {passage["id"]: passage["uri"] for passage in found.structured_content["passages"]}
        (contents,) = (await agent.read_resource(uris["a/b 1"])).contents
        assert (contents.text, contents.mime_type) == (BRIDGE, "text/plain")
        templates = (await agent.list_resource_templates()).resource_templates
        assert [template.uri_template for template in templates] == ["rag-posfix://passages/{id}"]
        with pytest.raises(MCPError, match="no passage has the address"):
            await agent.read_resource("rag-posfix://passages/missing")


async def test_a_passage_that_the_filter_of_the_pipeline_leaves_out_has_no_resource():
    async with client(make_pipeline(retriever=bm25()).with_filter({"year": 1963})) as agent:
        (contents,) = (await agent.read_resource("rag-posfix://passages/harbour")).contents
        assert contents.text == HARBOUR
        with pytest.raises(MCPError, match="no passage has the address"):
            await agent.read_resource("rag-posfix://passages/a%2Fb%201")


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///etc/passwd", "is not the address of a passage; use one of rag-posfix://passages/{id}"),
        ("rag-posfix://passages/", "is not the address of a passage"),
        ("rag-posfix://indexes/other/1", "this server has no index"),
    ],
)
async def test_another_address_is_refused(uri, message):
    async with client() as agent:
        with pytest.raises(MCPError) as caught:
            await agent.read_resource(uri)
    assert message in str(caught.value)


async def test_a_further_index_is_searched_by_its_name():
    parts = {"indexes": {"ice": BM25Retriever.from_documents(DOCUMENTS[1:])}}
    async with client(**parts) as agent:
        tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
        assert "index" in tools["search"].input_schema["properties"]
        found = await agent.call_tool("search", {"query": "harbour bridge", "index": "ice"})
        (passage,) = found.structured_content["passages"]
        assert passage["uri"] == "rag-posfix://indexes/ice/harbour"
        (contents,) = (await agent.read_resource(passage["uri"])).contents
        assert contents.text == HARBOUR
        wrong = await agent.call_tool("search", {"query": "harbour", "index": "fire"})
        assert (wrong.is_error, wrong.content[0].text) == (
            True, "no index is called 'fire'; use one of ice",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("search", {}, "query: Field required; the arguments are k, filter, query"),
        ("search", {"query": "a", "kk": 1}, "kk: Extra inputs are not permitted; the arguments are k, filter, query"),
        ("search", {"query": "a", "k": 0}, "k: Input should be greater than or equal to 1"),
        ("search", {"query": "a", "k": "3"}, "k: Input should be a valid integer"),
        ("search", {"query": " "}, "the question is empty"),
        ("search", {"query": "a", "filter": {"year": {"$gtt": 1}}}, "$gtt"),
        ("search", {"query": "a", "collection": "c"}, "collection='c': this server has none; leave it out"),
        ("ask", {"question": ""}, "question: String should have at least 1 character"),
    ],
)
async def test_wrong_arguments_are_an_error_that_the_model_reads(tool, arguments, message):
    async with client() as agent:
        result = await agent.call_tool(tool, arguments)
    assert result.is_error is True
    assert message in result.content[0].text
    assert "\n" not in result.content[0].text


async def test_an_unknown_tool_is_an_error_of_the_protocol():
    async with client() as agent:
        with pytest.raises(MCPError, match="unknown tool 'delete'; use search or ask"):
            await agent.call_tool("delete", {})
