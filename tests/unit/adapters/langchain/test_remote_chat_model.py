"""The chat model with a model on a server."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from rag_posfix import RagPosfixChatModel
from rag_posfix.errors import UnsupportedModelError, UpstreamError
from tests.support.upstream import error, streamed, upstream

ROME = Document(page_content="Rome lies on the Tiber.", id="rome")


def test_it_sends_the_conversation_and_returns_text_usage_and_documents():
    with upstream(streamed("The ", "Tiber.")) as server:
        model = RagPosfixChatModel(model=server.model, mitigation="none", api_key="sk-1", max_tokens=9, stop=["\n"])
        conversation = [SystemMessage("Be brief."), HumanMessage("Hello."), AIMessage("Hi."), HumanMessage("River?")]
        message = model.invoke(conversation, documents=[ROME])
        assert "sk-1" not in repr(model)
    assert message.content == "The Tiber."
    assert message.usage_metadata["input_tokens"] == 40
    assert message.response_metadata["model_name"] == "tiny"
    assert [one["id"] for one in message.response_metadata["documents"]] == ["rome"]
    (body,) = server.bodies
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert "Rome lies on the Tiber.\n\nBe brief.\n\nQuestion: Hello." in body["messages"][0]["content"]
    assert (body["max_tokens"], body["stop"]) == (9, ["\n", "\nQuestion:", "\nAnswer:"])
    assert server.headers[0]["authorization"] == "Bearer sk-1"


def test_retries_are_those_of_the_object():
    with upstream(error(503, "busy"), streamed("x")) as server:
        model = RagPosfixChatModel(model=server.model, mitigation="none", max_retries=0)
        with pytest.raises(UpstreamError, match="503"):
            model.invoke("River?")
    assert len(server.bodies) == 1


@pytest.mark.parametrize("mitigation", ["default", "context_experts"])
def test_methods_that_need_the_weights_are_refused_when_the_object_is_made(mitigation: str):
    with pytest.raises(UnsupportedModelError, match="set mitigation='none'"):
        RagPosfixChatModel(model="openai:m@http://127.0.0.1:1/v1", mitigation=mitigation)
