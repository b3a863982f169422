"""A pipeline as a tool of an agent, and typed answers of the chat model."""

import asyncio
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import Generation
from pydantic import BaseModel

from rag_posfix import PosfixRAG, RagPosfixChatModel
from rag_posfix.adapters.langchain.content_blocks import read_schema, typed_answers
from rag_posfix.assembly.assembler import Assembler
from rag_posfix.errors import ConfigError
from rag_posfix.generation.fake import FakeGenerator
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix.retrieval.bm25 import BM25Retriever
from tests.support.tool_models import tool_engine
from tests.support.toy_encoder import ToyEncoder
from tests.unit.adapters.langchain.runs import Runs

ROME = Document(page_content="Rome lies on the Tiber. It is old.", id="rome")
PARIS = Document(page_content="Paris lies on the Seine. It is big.", id="paris")
BREAD = Document(page_content="Bread is baked in ovens.", id="bread")
QUESTION = "Which river does Rome have, the Tiber?"
TEXT = "Rome lies on the Tiber"


class Fact(BaseModel):
    name: str
    year: int


def rag(*documents: Document) -> PosfixRAG:
    generator = FakeGenerator(ToyEncoder(), order_invariant=False)
    retriever = BM25Retriever.from_documents(documents)
    return PosfixRAG(pipeline=Pipeline(generator, Assembler(ToyEncoder(), 8192), retriever=retriever))


def ids(answer: Any) -> list[str]:
    return [document["id"] for document in answer["documents"]]


def test_it_answers_with_sources_as_artifact_and_takes_a_filter():
    documents = [d.model_copy(update={"metadata": {"old": d is ROME}}) for d in (ROME, PARIS, BREAD)]
    tool = rag(*documents).as_tool(name="cities", description="Of cities.")
    assert (tool.name, tool.description, set(tool.args)) == ("cities", "Of cities.", {"question", "filter"})
    call = {"type": "tool_call", "id": "1", "name": "cities", "args": {"question": "Rome, Paris, bread"}}
    message = tool.invoke(call)
    assert (message.content, message.tool_call_id) == (message.artifact["answer"], "1")
    assert sorted(ids(message.artifact)) == ["bread", "paris", "rome"]
    call["args"]["filter"] = {"old": True}
    assert ids(asyncio.run(tool.ainvoke(call)).artifact) == ["rome"]


def test_a_failed_question_is_a_message_and_its_runs_are_children():
    tool, runs = rag(ROME, PARIS).as_tool(), Runs()
    call = {"type": "tool_call", "id": "1", "name": tool.name, "args": {"question": QUESTION, "filter": {"$x": 1}}}
    message = tool.invoke(call)
    assert (message.status, "is not understood" in message.content) == ("error", True)
    called = tool.invoke({**call, "args": {"question": QUESTION}}, {"callbacks": [runs], "configurable": {"k": 1}})
    assert len(called.artifact["documents"]) == 1
    assert "PosfixRAG" in {run.name for run in runs.by_id.values() if run.parent is not None}
    with pytest.raises(ConfigError, match="as_tool takes name and description"):
        rag(ROME).as_tool(int)


def test_an_agents_model_calls_it_and_reads_what_it_found():
    tool = rag(ROME).as_tool(name="cities")
    model = RagPosfixChatModel(generator=tool_engine(), mitigation="none", max_tokens=24)
    bound = model.bind_tools([tool], tool_choice="cities")
    first = bound.invoke(QUESTION)
    assert first.content.startswith('{"name": "cities", "arguments":')
    called = AIMessage("", tool_calls=[{"name": "cities", "args": {"question": QUESTION}, "id": "a1b2c3d4e"}])
    found = tool.invoke(called.tool_calls[0])
    assert (found.content, ids(found.artifact)) == (TEXT, ["rome"])
    second = bound.invoke([HumanMessage(QUESTION), called, found])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    assert second.content.startswith('{"name": "cities"')


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"question": ""}, "question: String should have at least 1 character"),
        ({"query": "x"}, "question: Field required"),
        ({"question": QUESTION, "filter": "year=1911"}, "filter: Input should be a valid dictionary"),
    ],
)
def test_malformed_arguments_of_a_call_are_a_message_that_the_agent_reads(arguments, problem):
    tool = rag(ROME).as_tool()
    message = tool.invoke({"type": "tool_call", "id": "1", "name": tool.name, "args": arguments})
    assert (message.status, message.content) == ("error", problem)


@pytest.mark.parametrize(
    ("schema", "whole", "cut"),
    [
        (Fact, '{"name": "Maravel", "year": 1871}', '{"name": "Maravel", "year": 18'),
        ({"type": "object", "properties": {"name": {}}}, '{"name": "Maravel"}', '{"name": "Mara'),
    ],
)
def test_a_value_that_was_cut_is_no_value(schema, whole, cut):
    _, parser = read_schema(schema)
    parsed = parser.invoke(whole)
    assert (parsed.model_dump() if isinstance(parsed, BaseModel) else parsed)["name"] == "Maravel"
    with pytest.raises(OutputParserException, match=r"no complete JSON.*raise max_tokens"):
        parser.invoke(cut)
    assert parser.parse_result([Generation(text='{"name": "Mara')], partial=True) in (None, {"name": "Mara"})
    assert parser.parse_result([Generation(text="?")], partial=True) is None


@pytest.mark.parametrize("include_raw", [False, True])
def test_arguments_of_a_call_reach_the_model_of_typed_answers(include_raw):
    model = RagPosfixChatModel(generator=FakeGenerator(ToyEncoder()))
    typed = typed_answers(model, StrOutputParser(), include_raw=include_raw)
    answers = [
        typed.invoke(QUESTION, documents=[ROME]),
        typed.bind(documents=[ROME]).invoke(QUESTION),
        asyncio.run(typed.ainvoke(QUESTION, documents=[ROME])),
        *typed.batch([QUESTION], documents=[ROME]),
    ]
    assert [answer["parsed"] if include_raw else answer for answer in answers] == [TEXT] * 4
