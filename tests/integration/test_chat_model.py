"""The chat model against langchain's own suites, on a random model."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from rag_posfix.adapters.langchain.chat_model import RagPosfixChatModel
from rag_posfix.adapters.langchain.content_blocks import document_block
from rag_posfix.caching.kv.store import PassageStore
from rag_posfix.caching.tier import MemoryTier
from tests.support.tool_models import tool_engine

pytestmark = pytest.mark.slow

LIGHTHOUSES = [
    Document(page_content=f"The {name} lighthouse was designed by {who} and first lit in {year}.", id=name.lower())
    for name, who, year in (
        ("Torvane", "Anders Wick", 1883), ("Maravel", "Ilse Korvanth", 1871), ("Brenholt", "Jonas Aldring", 1902),
    )
]  # fmt: skip


class Flags:
    """What a small local text model does not do."""

    chat_model_class = RagPosfixChatModel
    has_tool_calling = False
    has_structured_output = False


class TestChatModelUnit(Flags, ChatModelUnitTests):
    @property
    def chat_model_params(self):
        return {"model": "smollm2"}


class TestChatModelOnAModel(Flags, ChatModelIntegrationTests):
    engine = tool_engine()

    @property
    def chat_model_params(self):
        return {"model": "tiny", "generator": self.engine, "max_tokens": 24}

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream=False):
        """Ask twice about the same documents, the second time in another order: only the question is read again."""
        store = PassageStore([MemoryTier()], device=self.engine.loaded.device)
        model = RagPosfixChatModel(generator=self.engine.with_passages(store), max_tokens=8)
        blocks = [document_block(document) for document in LIGHTHOUSES]
        question = {"type": "text", "text": "Who designed the Maravel lighthouse?"}
        first = model.invoke([HumanMessage([*blocks, question])])
        assert first.usage_metadata["input_token_details"]["cache_read"] == 0
        again = [HumanMessage([*blocks[::-1], question])]
        second = sum(model.stream(again), start=AIMessageChunk("")) if stream else model.invoke(again)
        usage = second.usage_metadata
        assert second.content == first.content
        assert 0.5 < usage["input_token_details"]["cache_read"] / usage["input_tokens"] < 1
        return second


def test_a_chat_model_that_loads_its_model_keeps_what_it_read(tiny_model):
    asked = [HumanMessage([*map(document_block, LIGHTHOUSES), {"type": "text", "text": "Who designed Torvane?"}])]
    for passage_bytes, expected in ((64 * 1024**2, True), (0, False)):
        model = RagPosfixChatModel(model=str(tiny_model), passage_bytes=passage_bytes, max_tokens=2)
        model.invoke(asked)
        assert (model.invoke(asked).usage_metadata["input_token_details"]["cache_read"] > 0) is expected
