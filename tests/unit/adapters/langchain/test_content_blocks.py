import dataclasses

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

from rag_posfix.adapters.langchain.content_blocks import document_block, question_fields, read_conversation
from rag_posfix.contracts.answer import Question
from rag_posfix.contracts.request import Sampling
from rag_posfix.contracts.tools import ToolUse
from rag_posfix.errors import ConfigError

PARIS = "Paris is the capital of France."


def only_document(block):
    conversation = read_conversation([HumanMessage([block, {"type": "text", "text": "Which city?"}])])
    assert conversation.question == "Which city?"
    (document,) = conversation.documents
    return document


def test_documents_of_a_message_count_under_question_and_in_the_history_too():
    block = document_block(Document(PARIS, id="p"))
    message = HumanMessage([block, {"type": "text", "text": "Which city?"}])
    fields = question_fields({"question": message, "context": ["Rome."]})
    assert (fields["text"], [each.page_content for each in fields["documents"]]) == ("Which city?", [PARIS, "Rome."])
    assert question_fields({"question": message})["documents"] == question_fields(message)["documents"]
    earlier = question_fields({"question": "And?", "history": [message, AIMessage("Paris.")]})["history"]
    assert earlier == question_fields([message, AIMessage("Paris."), HumanMessage("And?")])["history"]


@pytest.mark.parametrize(
    ("block", "identity", "metadata"),
    [
        ({"type": "text-plain", "text": PARIS}, None, {}),
        (
            {"type": "text-plain", "text": PARIS, "id": "p", "title": "France", "extras": {"relevance_score": 0.5}},
            "p",
            {"title": "France", "relevance_score": 0.5},
        ),
        ({"type": "document", "document": {"data": {"text": PARIS}}}, None, {}),
        (
            {"type": "document", "document": {"id": "p", "data": {"text": PARIS, "title": "France"}}},
            "p",
            {"title": "France"},
        ),
        ({"type": "document", "document": {"data": {"snippet": PARIS}}}, None, {}),
        ({"type": "document", "document": PARIS}, None, {}),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": PARIS}}, None, {}),
        (
            {"type": "document", "source": {"type": "text", "data": PARIS}, "title": "France", "id": 7},
            "7",
            {"title": "France"},
        ),
    ],
)
def test_documents_of_three_kinds_are_read(block, identity, metadata):
    document = only_document(block)
    assert (document.page_content, document.id, document.metadata) == (PARIS, identity, metadata)


@pytest.mark.parametrize(
    "document",
    [
        Document(page_content=PARIS),
        Document(page_content="", id="empty"),
        Document(page_content=PARIS, id="p", metadata={"title": "France", "relevance_score": 0.25, "page": 3}),
    ],
)
def test_a_document_survives_the_way_through_a_block(document):
    assert only_document(document_block(document)) == document


def test_a_block_shares_nothing_with_its_document():
    document = Document(page_content=PARIS, metadata={"page": 3})
    document_block(document)["extras"]["page"] = 4
    assert document.metadata == {"page": 3}


def test_several_human_messages_at_the_end_are_one_question_with_all_their_documents():
    conversation = read_conversation(
        [
            HumanMessage([document_block(Document(page_content="one", id="1")), "Read this."]),
            HumanMessage([document_block(Document(page_content="two", id="2"))]),
            HumanMessage("Which city?"),
        ]
    )
    assert conversation.question == "Read this.\n\nWhich city?"
    assert [document.id for document in conversation.documents] == ["1", "2"]
    assert conversation.history == ()


def test_earlier_messages_are_history_and_their_documents_become_text():
    conversation = read_conversation(
        [
            SystemMessage("Be brief."),
            HumanMessage([document_block(Document(page_content=PARIS)), {"type": "text", "text": "Which city?"}]),
            AIMessage("Paris."),
            HumanMessage("Which river?"),
        ]
    )
    assert conversation.history == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{PARIS}\n\nWhich city?"},
        {"role": "assistant", "content": "Paris."},
    )
    assert (conversation.question, conversation.documents) == ("Which river?", ())


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are 0 messages"),
        ([HumanMessage("a"), AIMessage("b")], "the last message is a AIMessage; it must be a human message"),
        ([ToolMessage("a", tool_call_id="1"), HumanMessage("b")], "a ToolMessage cannot be read"),
        ([HumanMessage([{"type": "image_url", "image_url": "x"}])], "of type 'image_url' cannot be read; allowed: te"),
        ([HumanMessage([{"type": "document", "document": {"data": {"text": 5}}}])], "holds int as text"),
        ([HumanMessage([{"type": "document", "source": {"type": "url", "url": "x"}}])], "of type 'url'; it must be"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(messages, message):
    with pytest.raises(ConfigError) as caught:
        read_conversation(messages)
    assert message in str(caught.value)


def test_a_question_object_keeps_every_field():
    values = {
        "documents": None, "history": [{"role": "user", "content": "Hello"}], "mitigation": "none", "order": "reverse",
        "seed": 3, "k": 2, "sampling": Sampling(max_tokens=5), "tenant": "bolt", "use_cache": False,
        "index": "archive", "reranker": "embedding:top_n=2", "allow_ungrounded": True, "template": None,
        "allow_unsupported": True, "second_step": False,
        "query": "last", "filter": {"year": 1}, "min_relevance": 0.5, "tools": ToolUse(choice="none"),
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Question)} == {"text", *values}
    question = Question("Which city?", **values)
    assert Question(**question_fields(question)) == question
