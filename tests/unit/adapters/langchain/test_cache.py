import math
from contextlib import closing

import pytest
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, Generation, GenerationChunk
from langchain_tests.integration_tests.cache import AsyncCacheTestSuite, SyncCacheTestSuite

from rag_posfix.adapters.langchain.cache import RagPosfixCache
from rag_posfix.caching.answers.tiered import BlobCodec, TieredAnswerCache
from rag_posfix.caching.disk import DiskTier
from rag_posfix.caching.tier import MemoryTier


@pytest.fixture
def cache(tmp_path):
    tiers = TieredAnswerCache([MemoryTier(), DiskTier(tmp_path, BlobCodec(), busy_seconds=60)])
    with closing(tiers):
        yield RagPosfixCache(tiers)


class TestEmbeddedSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self, cache):
        return cache


class TestEmbeddedAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self, cache):
        return cache


MESSAGE = AIMessage(
    content=[{"type": "text", "text": "Paris"}],
    id="run-1",
    name="model",
    response_metadata={"finish_reason": "stop", "logprobs": [{"token": "P", "logprob": -0.25}]},
    additional_kwargs={"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {}},
    usage_metadata={"input_tokens": 3, "output_tokens": 1, "total_tokens": 4},
    tool_calls=[{"name": "search", "args": {"q": "x"}, "id": "call-1", "type": "tool_call"}],
)
ROUND_TRIPS = {
    "plain": Generation(text="é", generation_info={"nested": {"list": [1, 2.5, None, True]}}),
    "empty": Generation(text=""),
    "chunk": GenerationChunk(text="x"),
    "chat": ChatGeneration(message=AIMessage("Paris"), generation_info={"finish_reason": "stop"}),
    "full chat": ChatGeneration(message=MESSAGE),
    "chat chunk": ChatGenerationChunk(message=AIMessageChunk(content="Paris")),
    "human": ChatGeneration(message=HumanMessage("Hello")),
    "looks like a serialised object": Generation(
        text="x", generation_info={"lc": 1, "type": "secret", "id": ["OPENAI_API_KEY"]}
    ),
}


@pytest.mark.parametrize("generation", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_a_generation_comes_back_equal_and_of_its_class(cache, generation):
    cache.update("prompt", "model", [generation])
    found = cache.lookup("prompt", "model")
    assert found == [generation]
    assert type(found[0]) is type(generation)


def test_no_generations_are_a_hit(cache):
    cache.update("prompt", "model", [])
    assert cache.lookup("prompt", "model") == []


class OwnGeneration(Generation):
    pass


@pytest.mark.parametrize(
    "generation",
    [
        OwnGeneration(text="x"),
        Generation(text="x", generation_info={"a": object()}),
        Generation(text="x", generation_info={"a": (1, 2)}),
        Generation(text="x", generation_info={"a": math.nan}),
        Generation(text="x", generation_info={"a": math.inf}),
        Generation(text="\ud800"),
    ],
)
def test_what_would_not_come_back_equal_is_not_kept(cache, generation):
    cache.update("prompt", "model", [generation])
    assert cache.lookup("prompt", "model") is None


def test_prompt_and_model_are_the_key(cache):
    cache.update("ab", "c", [Generation(text="1")])
    assert cache.lookup("a", "bc") is None
    assert cache.lookup("ab", "d") is None


@pytest.mark.parametrize(
    "generations",
    [
        "text",
        [None],
        [{"type": "Generation", "text": "x", "generation_info": "info"}],
        [{"type": "os.system", "text": "x", "generation_info": None}],
        [{"type": "ChatGeneration", "message": {"type": "evil", "data": {}}, "generation_info": None}],
        [{"type": "ChatGeneration", "message": {"type": "ai", "data": {}}, "generation_info": None}],
    ],
)
def test_a_damaged_entry_is_a_miss(generations):
    class Damaging(TieredAnswerCache):
        """Stores damaged generations in place of those that it is given."""

        def put(self, key, value, document_ids=()):
            super().put(key, {"generations": generations}, document_ids)
            assert self.get(key) == {"generations": generations}

    cache = RagPosfixCache(Damaging([MemoryTier()]))
    cache.update("prompt", "model", [Generation(text="x")])
    assert cache.lookup("prompt", "model") is None


async def test_langchain_models_use_it(cache):
    chat = FakeListChatModel(responses=["first", "second"], cache=cache)
    assert chat.invoke("question").content == "first"
    assert (await chat.ainvoke("question")).content == "first"
    assert chat.invoke("another").content == "second"
    plain = FakeListLLM(responses=["first", "second"], cache=cache)
    assert [plain.invoke("question"), plain.invoke("question")] == ["first", "first"]
    await cache.aclear()
    assert plain.invoke("question") == "second"


def test_without_arguments_it_caches_in_memory():
    cache = RagPosfixCache()
    cache.update("prompt", "model", [Generation(text="x")])
    assert cache.lookup("prompt", "model") == [Generation(text="x")]
    assert RagPosfixCache().lookup("prompt", "model") is None
