"""The arguments of the chat model, without weights; langchain's own suite runs it on real weights."""

import asyncio
import copy
import pickle
import threading
from dataclasses import replace

import pytest
from langchain_core.caches import BaseCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration

from rag_posfix import RagPosfixCache, RagPosfixChatModel, document_block
from rag_posfix.cancellation import check_cancelled
from rag_posfix.errors import ConfigError, GenerationCancelled
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.text import NO_PASSAGE_TEXT
from tests.support.toy_encoder import ToyEncoder

ROME = Document(page_content="Rome lies on the Tiber. It is old.", id="rome")
BREAD = Document(page_content="Bread is baked in ovens.", id="bread")
QUESTION = "Which river does Rome have, the Tiber?"
TEXT = "Rome lies on the Tiber"


def chat(**options):
    return RagPosfixChatModel(generator=FakeGenerator(ToyEncoder()), **options)


def ids(message):
    return [document["id"] for document in message.response_metadata["documents"]]


class TestConstruction:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mitigatoin": "none"}, "no parameter 'mitigatoin'. Did you mean 'mitigation'"),
            ({"mitigation": "context_expert"}, "Did you mean 'context_experts'"),
            ({"mitigation": "context_experts", "mitigation_parameters": {"expert": 2}}, "Did you mean 'experts'"),
        ],
    )
    def test_what_is_unknown_is_refused_before_a_model_is_loaded(self, options, message):
        with pytest.raises(ConfigError, match=message):
            RagPosfixChatModel(**options)

    def test_a_method_may_be_named_with_its_parameters(self):
        message = chat(mitigation="context_experts:experts=2").invoke(QUESTION, documents=[ROME])
        assert message.response_metadata["mitigation"] == "context_experts"


class TestDocuments:
    def test_documents_without_text_are_documents_however_they_are_given(self):
        empty = Document("", id="scan")
        message = HumanMessage([document_block(empty), {"type": "text", "text": QUESTION}])
        assert (
            chat().invoke([message]).content == NO_PASSAGE_TEXT == chat().invoke(QUESTION, documents=[empty]).content
        )

    def test_they_are_given_at_the_call_streamed_and_bound(self):
        asked = chat(order="original")
        for documents in ([BREAD, ROME], [ROME, BREAD]):
            expected = [document.id for document in documents]
            assert ids(asked.invoke(QUESTION, documents=documents)) == expected
            assert ids(asked.bind(documents=documents).invoke(QUESTION)) == expected
            chunks = list(asked.stream(QUESTION, documents=documents))
            assert "".join(chunk.content for chunk in chunks) == TEXT
            assert ids(chunks[-1]) == expected

    def test_they_follow_those_in_the_message(self):
        message = HumanMessage([document_block(ROME), {"type": "text", "text": QUESTION}])
        assert ids(chat(order="original").invoke([message], documents=[BREAD])) == ["rome", "bread"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"docs": [ROME]}, "has no parameter 'docs'. Did you mean 'documents'"),
            ({"top_k": 3}, "has no parameter 'top_k'.*It takes: documents, model"),
            ({"documents": "Rome"}, "documents is str; give a list of langchain_core Documents"),
            ({"documents": ["Rome"]}, r"documents\[0\] is str"),
            ({"mitigation": "non"}, "unknown mitigation 'non'"),
        ],
    )
    def test_what_a_call_cannot_take_is_refused(self, options, message):
        with pytest.raises(ConfigError, match=message):
            chat().invoke(QUESTION, **options)

    def test_parameters_of_the_object_are_not_those_of_another_method_of_a_call(self):
        model = chat(mitigation="context_experts", mitigation_parameters={"experts": 2})
        assert model.invoke(QUESTION, documents=[ROME], mitigation="none").response_metadata["mitigation"] == "none"


class TestWithoutDocuments:
    def test_an_empty_list_has_the_answer_that_no_passage_was_found(self, caplog):
        model = chat()
        (*_, streamed) = model.stream(QUESTION, documents=[])
        for message in (model.invoke(QUESTION, documents=[]), model.bind(documents=[]).invoke(QUESTION), streamed):
            assert message.content == NO_PASSAGE_TEXT
            assert message.response_metadata["grounded"] is False
        assert chat(no_passage_text="Nothing.").invoke(QUESTION, documents=[]).content == "Nothing."
        assert caplog.records == []

    def test_a_conversation_and_an_allowed_question_are_answered_and_said_to_be_without_passages(self):
        for message in (chat().invoke(QUESTION), chat(allow_ungrounded=True).invoke(QUESTION, documents=[])):
            assert message.content.startswith("No passages for")
            assert message.response_metadata["grounded"] is False
        assert chat().invoke(QUESTION, documents=[ROME]).response_metadata["grounded"] is True

    def test_passages_that_are_cut_or_left_out_are_named(self):
        long = Document(page_content="Rome " * 9000, id="long", metadata={"relevance_score": 0.9})
        other = Document(page_content="Bread " * 9000, id="other", metadata={"relevance_score": 0.1})
        metadata = chat().invoke(QUESTION, documents=[other, long]).response_metadata
        assert metadata["truncated"] == ["long"]
        assert metadata["dropped"] == [{"id": "other", "reason": "budget"}]

    def test_it_is_told_once_that_nothing_is_corrected(self, caplog):
        model = chat()
        assert model.invoke(QUESTION).content
        assert model.invoke(QUESTION).content
        (record,) = caplog.records
        assert "the prompt holds no documents, so the method default corrects nothing" in record.getMessage()

    def test_it_is_not_told_with_documents_or_without_a_method(self, caplog):
        chat().invoke(QUESTION, documents=[ROME])
        chat(mitigation="none").invoke(QUESTION)
        assert caplog.records == []


class OtherGenerator(FakeGenerator):
    fingerprint = "fake-2"

    def stream(self, request):
        for chunk in super().stream(request):
            yield replace(chunk, text=chunk.text.upper())


class FullCache(BaseCache):
    """Has an answer for every key."""

    def __init__(self):
        self.keys = []

    def lookup(self, prompt, llm_string):
        self.keys.append(llm_string)
        return [ChatGeneration(message=AIMessage("kept"))]

    def update(self, prompt, llm_string, return_val):
        raise AssertionError("every lookup is a hit")

    def clear(self):
        self.keys.clear()


class TestCache:
    @pytest.mark.parametrize(
        ("options", "documents"),
        [
            ({"stop": ["e"]}, [ROME]),
            ({"allow_ungrounded": True}, []),
            ({"no_passage_text": "Nothing."}, []),
            ({"generator": OtherGenerator(ToyEncoder())}, [ROME]),
        ],
    )
    def test_an_answer_of_a_model_with_other_fields_is_not_used(self, options, documents):
        other = RagPosfixChatModel(**{"generator": FakeGenerator(ToyEncoder())} | options)
        expected = other.invoke(QUESTION, documents=documents).content
        cache = RagPosfixCache()
        assert chat(cache=cache).invoke(QUESTION, documents=documents).content != expected
        cached = other.model_copy(update={"cache": cache})
        for _ in range(2):
            assert cached.invoke(QUESTION, documents=documents).content == expected

    def test_stop_strings_of_the_model_and_of_the_call_are_both_in_the_key(self):
        cache = RagPosfixCache()
        models = (chat(cache=cache), chat(cache=cache, stop=["on"]))
        stopped = [model.invoke(QUESTION, documents=[ROME], stop=["Tiber"]).content for model in models]
        assert stopped == ["Rome lies on the ", "Rome lies "]

    def test_the_adapter_and_dtype_of_the_settings_are_in_the_key_and_secrets_are_not(self, monkeypatch):
        cache = FullCache()
        model = RagPosfixChatModel(api_key="secret", cache=cache)
        assert model.invoke(QUESTION).content == "kept"
        for name, value in (("ADAPTER", "/adapters/law"), ("DTYPE", "float16")):
            monkeypatch.setenv(f"RAG_POSFIX_{name}", value)
            model.invoke(QUESTION)
        assert len(set(cache.keys)) == 3
        assert "secret" not in "".join(cache.keys)


def test_tokens_are_counted_by_the_tokenizer_of_the_model():
    assert chat().get_token_ids(QUESTION) == ToyEncoder().encode_text(QUESTION)
    assert chat().get_num_tokens(QUESTION) == len(ToyEncoder().encode_text(QUESTION)) > 0


class WaitingGenerator(FakeGenerator):
    """Its answer goes on until the request is cancelled."""

    def __init__(self):
        super().__init__(ToyEncoder())
        self.begun, self.ended = threading.Event(), threading.Event()

    def stream(self, request):
        self.begun.set()
        try:
            while not self.ended.wait(0.01):
                check_cancelled()
        except GenerationCancelled:
            self.ended.set()
            raise
        yield from super().stream(request)


async def test_an_answer_whose_task_is_cancelled_stops():
    generator = WaitingGenerator()
    asking = asyncio.ensure_future(RagPosfixChatModel(generator=generator).ainvoke(QUESTION, documents=[ROME]))
    await asyncio.to_thread(generator.begun.wait, 60)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await asyncio.to_thread(generator.ended.wait, 60)


def test_a_copy_has_the_configuration_and_shares_the_loaded_model():
    model = chat(max_tokens=5, stop=["x"])
    answer = model.invoke(QUESTION, documents=[ROME]).content  # loads it, which locks
    copied = copy.deepcopy(model)
    assert (copied.max_tokens, copied.generator is model.generator) == (5, True)
    assert copied.invoke(QUESTION, documents=[ROME]).content == answer
    copied.stop.append("y")
    assert model.stop == ["x"]


def test_a_pickle_holds_the_configuration_and_the_model_is_loaded_where_it_is_read():
    model = RagPosfixChatModel(model="some/model", max_tokens=5, mitigation="none", api_key="k")
    read = pickle.loads(pickle.dumps(model))
    assert read.model_dump() == model.model_dump()
    assert (read.model_name, read.max_tokens, read.api_key.get_secret_value()) == ("some/model", 5, "k")
    with pytest.raises(ConfigError, match="'some/model' cannot be loaded"):
        read.invoke("Who?")


def test_a_model_with_a_generator_is_not_pickled():
    with pytest.raises(ConfigError, match=r"generator=FakeGenerator cannot be pickled; make it with model="):
        pickle.dumps(chat())
