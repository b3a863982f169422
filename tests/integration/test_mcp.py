"""``rag-posfix mcp`` as the SDK's own client starts it, and an agent of LlamaIndex that asks the service."""

import os
import re
import sys

import httpx2
import pytest
from langchain_core.documents import Document
from mcp import Client, StdioServerParameters

from rag_posfix.retrieval.bm25 import BM25Retriever
from rag_posfix.retrieval.faiss_store import FaissVectorStore
from rag_posfix.retrieval.index.file_formats import BM25Index
from tests.support.letter_embeddings import LetterEmbeddings
from tests.support.serving import make_pipeline, serving

pytestmark = pytest.mark.slow

DOCUMENTS = [
    Document("The Maravel lighthouse was first lit in 1868.", id="lighthouse", metadata={"year": 1868}),
    Document("Rye bread from Tull is baked for nine hours.", id="bread"),
]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """The command of a server of an index, with a random model that reads all that is found."""
    folder = tmp_path_factory.mktemp("mcp") / "my.index"
    store = FaissVectorStore(LetterEmbeddings("minilm"))
    store.add_documents(DOCUMENTS)
    store.save(folder, bm25=BM25Index.build([document.page_content for document in DOCUMENTS]))
    options = {"index": folder, "model": tiny_model, "retriever": "bm25", "min-relevance": "off", "max-tokens": 4}
    return ["-m", "rag_posfix.cli.main", "mcp", *(f"--{name}={value}" for name, value in options.items())]


async def test_the_client_of_the_sdk_searches_asks_and_reads_over_stdio(server):
    parameters = StdioServerParameters(command=sys.executable, args=server, env=dict(os.environ))
    async with Client(parameters, read_timeout_seconds=250) as client:
        found = await client.call_tool("search", {"query": "lighthouse"})
        (passage,) = found.structured_content["passages"]
        assert passage["id"] == "lighthouse"
        (contents,) = (await client.read_resource(passage["uri"])).contents
        assert contents.text == DOCUMENTS[0].page_content
        answer = await client.call_tool("ask", {"question": "When was the lighthouse lit?"})
        assert answer.is_error is False
        assert [source["id"] for source in answer.structured_content["sources"]] == ["lighthouse"]


# The workflows of LlamaIndex list the members of their agents, deprecated ones of pydantic among them.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
async def test_an_agent_of_llama_index_calls_the_tools():
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.llms import ChatResponse, LLMMetadata
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.tools import ToolSelection
    from llama_index.tools.mcp import BasicMCPClient, McpToolSpec

    class Scripted(FunctionCallingLLM):
        """Searches once, and then repeats what it read."""

        @property
        def metadata(self):
            return LLMMetadata(is_function_calling_model=True, model_name="scripted")

        def _prepare_chat_with_tools(self, tools, user_msg=None, chat_history=None, **options):
            assert {tool.metadata.name for tool in tools} == {"search", "ask"}
            return {"messages": chat_history}

        async def achat_with_tools(self, tools, user_msg=None, chat_history=None, **options):
            last = chat_history[-1]
            said = re.search(r"first lit in (\d+)", str(last.content)) if last.role == "tool" else None
            return ChatResponse(message=ChatMessage(role="assistant", content=said[1] if said else ""))

        async def astream_chat_with_tools(self, tools, user_msg=None, chat_history=None, **options):
            async def stream():
                yield await self.achat_with_tools(tools, user_msg, chat_history)

            return stream()

        def get_tool_calls_from_response(self, response, error_on_no_tool_call=True, **options):
            if response.message.content:
                return []
            return [ToolSelection(tool_id="1", tool_name="search", tool_kwargs={"query": "lighthouse", "k": 1})]

        def chat(self, messages, **options):
            raise NotImplementedError

        achat = astream_chat = stream_chat = complete = acomplete = stream_complete = astream_complete = chat

    pipeline = make_pipeline(retriever=BM25Retriever.from_documents(DOCUMENTS), embeddings=LetterEmbeddings())
    with serving(pipeline) as url:
        async with httpx2.AsyncClient(timeout=60) as http:  # a client of BasicMCPClient's own is never closed
            mcp = BasicMCPClient(url + "/mcp", http_client=http)
            tools = await McpToolSpec(client=mcp).to_tool_list_async()
            answer = await FunctionAgent(tools=tools, llm=Scripted()).run("When was the lighthouse lit?")
    assert "1868" in str(answer)
