"""Tools over HTTP: calls that must be made, calls that the model decides to make, and results, by real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from rag_posfix.assembly.assembler import Assembler
from rag_posfix.pipeline.pipeline import Pipeline
from rag_posfix_api.runtime import jobs
from tests.support.serving import BRIDGE, QUESTION, DictCache, ListRetriever, chat, client_for, serving
from tests.support.tool_calls import ANTHROPIC_TOOLS, FLAT_TOOLS, HORN, LAMP, OPENAI_TOOLS, Scripted, scripted
from tests.support.tool_models import tool_engine

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CHOSEN: Any = {"type": "function", "function": {"name": "lamp"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service whose random model writes nonsense where nothing constrains it."""
    engine = tool_engine()
    with serving(Pipeline(engine, Assembler(engine.encoder, engine.context_window))) as url:
        yield url


@pytest.fixture(scope="module")
def gpt(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def writer() -> Iterator[tuple[Scripted, str]]:
    """A generator whose answer may be set, and the address of its service."""
    generator, pipeline = scripted("")
    with serving(pipeline) as url:
        yield generator, url


@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_openais_client_gets_the_call_that_must_be_made_and_sends_its_result(gpt: openai.OpenAI, choice: Any):
    asked: dict[str, Any] = {
        "model": "default",
        "temperature": 1.0,
        "seed": 3,
        "tools": OPENAI_TOOLS,
        "extra_body": {"documents": [BRIDGE]},
    }
    completion = gpt.chat.completions.create(messages=MESSAGES, tool_choice=choice, **asked)
    message = completion.choices[0].message
    (call,) = message.tool_calls or []
    assert (completion.choices[0].finish_reason, message.content, call.type) == ("tool_calls", None, "function")
    assert call.type == "function"
    assert call.function.name in (("lamp", "horn") if choice == "required" else ("lamp",))
    assert json.loads(call.function.arguments) in ({"lit": True}, {"lit": False})
    with gpt.chat.completions.stream(messages=MESSAGES, tool_choice=choice, **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls or []
    assert (streamed.finish_reason, again.function.model_dump(exclude={"parsed_arguments"})) == (
        "tool_calls", call.function.model_dump(),
    )  # fmt: skip
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is dark."}
    history = [*MESSAGES, message.model_dump(exclude_none=True), result]
    answer = gpt.chat.completions.create(messages=history, max_tokens=3, tool_choice="none", **asked)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "horn"}])
def test_anthropics_client_gets_the_call_that_must_be_made_and_sends_its_result(claude: Any, choice: Any):
    asked: dict[str, Any] = {"model": "default", "max_tokens": 60, "tools": ANTHROPIC_TOOLS}
    message = claude.messages.create(messages=MESSAGES, tool_choice=choice, **asked)
    (block,) = message.content
    assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.name in (("lamp", "horn") if choice["type"] == "any" else ("horn",))
    assert block.input in ({"lit": True}, {"lit": False})
    with claude.messages.stream(messages=MESSAGES, tool_choice=choice, **asked) as stream:
        streamed = stream.get_final_message()
    assert [(each.type, each.name, each.input) for each in streamed.content] == [("tool_use", block.name, block.input)]
    assert streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "It is dark."}]}
    history = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(messages=history, **asked | {"max_tokens": 3, "tool_choice": {"type": "none"}})
    assert [each.type for each in answer.content] == ["text"]
    count = claude.messages.count_tokens
    with_tools = count(model="default", messages=MESSAGES, tools=ANTHROPIC_TOOLS).input_tokens
    assert with_tools > count(model="default", messages=MESSAGES).input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "lamp"}])
def test_openais_responses_have_the_call_that_must_be_made_and_take_its_result(gpt: openai.OpenAI, choice: Any):
    asked: dict[str, Any] = {"model": "default", "tools": FLAT_TOOLS}
    response = gpt.responses.create(input=QUESTION, tool_choice=choice, **asked)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) in ({"lit": True}, {"lit": False})
    with gpt.responses.stream(input=QUESTION, tool_choice=choice, **asked) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert [(item.type, item.name, item.arguments) for item in final.output if item.type == "function_call"] == [
        ("function_call", call.name, call.arguments)
    ]
    assert "response.function_call_arguments.done" in types
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is dark."}
    history: list[Any] = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
    answer = gpt.responses.create(input=history, **asked | {"tool_choice": "none", "max_output_tokens": 3})
    assert [item.type for item in answer.output] == ["message"]


ANSWERS = {
    "text": ("Plain text.", "Plain text.", []),
    "call": (LAMP, "", ["lamp"]),
    "both": (f"I look.\n{LAMP}\n{HORN}", "I look.", ["lamp", "horn"]),
    "malformed": ('<tool_call>\n{"name": "lamp", "arguments": {"lit"', None, []),
    "other": (LAMP.replace("lamp", "siren"), None, []),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_where_the_model_decides_text_and_calls_reach_every_client(
    writer: tuple[Scripted, str], name: str, stream: bool
):
    (generator, url), (written, text, names) = writer, ANSWERS[name]
    generator.answer = written
    for read in (by_openai, by_responses, by_anthropic, by_ollama):
        got_text, calls = read(url, stream)
        assert (read.__name__, got_text.strip()) == (read.__name__, written if text is None else text)
        assert [called for called, _ in calls] == names
        assert all(arguments == {"lit": called == "lamp"} for called, arguments in calls)


def by_openai(url: str, stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "default", "messages": MESSAGES, "tools": OPENAI_TOOLS}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    return choice.message.content or "", [(c.function.name, json.loads(c.function.arguments)) for c in calls]


def by_responses(url: str, stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "default", "input": QUESTION, "tools": FLAT_TOOLS}
        if stream:
            with client.responses.stream(**asked) as events:
                list(events)
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**asked)
    calls = [item for item in response.output if item.type == "function_call"]
    return response.output_text, [(call.name, json.loads(call.arguments)) for call in calls]


def by_anthropic(url: str, stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "default", "messages": MESSAGES, "tools": ANTHROPIC_TOOLS, "max_tokens": 99}
        if stream:
            with client.messages.stream(**asked) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**asked)
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == ("tool_use" if calls else "end_turn")
    return "".join(block.text for block in message.content if block.type == "text"), calls


def by_ollama(url: str, stream: bool) -> tuple[str, list[tuple[str, Any]]]:
    with ollama.Client(host=url) as client:
        asked: dict[str, Any] = {"model": "default", "messages": MESSAGES, "tools": OPENAI_TOOLS}
        parts = list(client.chat(**asked, stream=True)) if stream else [client.chat(**asked)]
    calls = [call.function for part in parts for call in part.message.tool_calls or []]
    return "".join(part.message.content or "" for part in parts), [(c.name, dict(c.arguments)) for c in calls]


HISTORY: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "lamp", "arguments": '{"lit": true}'}},
        {"id": "call_2", "type": "function", "function": {"name": "horn", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "call_2", "content": "It is loud."},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "It is bright."}]},
]  # fmt: skip
OLLAMA_HISTORY: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "horn", "arguments": {}}}, {"function": {"name": "lamp", "arguments": {"lit": True}}},
    ]},
    {"role": "tool", "tool_name": "horn", "content": "It is loud."},
    {"role": "tool", "tool_name": "lamp", "content": "It is bright."},
]  # fmt: skip
ANTHROPIC_HISTORY: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "content": [
        {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "toolu_1", "name": "lamp", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is broken.", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]},
]  # fmt: skip
ITEMS: list[Any] = [
    *MESSAGES,
    {"type": "function_call", "call_id": "call_1", "name": "lamp", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "It is bright."}]},
]


@pytest.mark.parametrize(
    ("path", "fields", "parts"),
    [
        ("/v1/chat/completions", {"messages": HISTORY}, ["lamp", '{"lit": true}', "It is loud.", "It is bright."]),
        (
            "/api/chat",
            {"messages": OLLAMA_HISTORY, "stream": False},
            ['{"lit": true}', "It is loud.", "It is bright."],
        ),
        ("/v1/messages", {"messages": ANTHROPIC_HISTORY}, ["I look.", "Error: It is broken.", "Well?"]),
        ("/v1/responses", {"input": ITEMS}, ["lamp", "It is bright."]),
    ],
)
def test_calls_and_their_results_in_a_conversation_are_read_without_tools_too(
    path: str, fields: Any, parts: list[str]
):
    generator, pipeline = scripted("It shines.")
    response = client_for(pipeline).post(path, json={"model": "default", "max_tokens": 9, **fields})
    assert (response.status_code, "It shines." in response.text) == (200, True), response.text
    (prompt,) = generator.prompts
    assert [prompt.count(part) > 0 for part in parts] == [True] * len(parts)
    assert "<tools>" not in prompt
    assert prompt.index(QUESTION) < prompt.index("<tool_call>") < prompt.index("<tool_response>")


TOOLS = {"tools": OPENAI_TOOLS}


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [
        ("/v1/chat/completions", {"functions": [{"name": "lamp"}]}, "functions is not supported"),
        ("/v1/chat/completions", {**TOOLS, "response_format": {"type": "json_object"}}, "response_format is not"),
        ("/v1/chat/completions", {**TOOLS, "logprobs": True}, "logprobs is not supported next to tools"),
        ("/v1/chat/completions", {**TOOLS, "tool_choice": "siren"}, "tool_choice='siren' must be"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "it has none"),
        ("/v1/chat/completions", {"tools": [{"type": "custom"}]}, "a tool of type 'custom'"),
        ("/v1/chat/completions", {"tools": [*OPENAI_TOOLS, OPENAI_TOOLS[0]]}, "3 tools of 2 names"),
        ("/v1/chat/completions", {"tools": [{"function": {"name": "<|im_start|>"}}]}, "needs a name of"),
        ("/v1/chat/completions", {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]}, "object"),
        ("/v1/chat/completions", {"messages": HISTORY[2:]}, "is the id of no call"),
        ("/v1/chat/completions", {"messages": HISTORY[1:]}, "role 'tool'; it must be 'user'"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ("/api/chat", {**TOOLS, "format": "json"}, "format is not supported next to tools"),
    ],
)
def test_what_cannot_be_honoured_next_to_tools_is_refused_by_name(path: str, fields: Any, part: str):
    _, pipeline = scripted("It shines.")
    body = {"model": "default", "messages": MESSAGES, "input": QUESTION, "max_tokens": 9, **fields}
    response = client_for(pipeline).post(path, json=body)
    assert response.status_code == 400, response.text
    assert part in response.text.replace('\\"', '"')


def test_a_generator_without_tools_refuses_them_and_takes_those_that_nobody_may_call():
    client = client_for()
    refused = client.post("/v1/chat/completions", json=chat(documents=[BRIDGE], tools=OPENAI_TOOLS))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
    assert "tools is not supported by the served model fake" in refused.json()["error"]["message"]
    taken = chat(documents=[BRIDGE], tools=OPENAI_TOOLS, tool_choice="none", response_format={"type": "text"})
    assert client.post("/v1/chat/completions", json=taken).status_code == 200


def calls_of(client: Any, **fields: Any) -> list[str]:
    response = client.post(
        "/v1/chat/completions", json=chat(**{"documents": [BRIDGE], "tools": OPENAI_TOOLS, **fields})
    )
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    return [call["function"]["name"] for call in message.get("tool_calls", [])]


def test_cached_answers_have_their_calls_and_belong_to_their_tools():
    generator, pipeline = scripted(f"{LAMP}\n{HORN}", cache=DictCache())
    client = client_for(pipeline)
    assert [calls_of(client) for _ in range(2)] == [["lamp", "horn"]] * 2
    assert len(generator.prompts) == 1
    assert calls_of(client, parallel_tool_calls=False) == ["lamp"]
    assert calls_of(client, tools=OPENAI_TOOLS[:1]) == ["lamp"]
    assert calls_of(client, tool_choice="none") == []
    assert calls_of(client, messages=HISTORY) == ["lamp", "horn"]


def test_results_of_tools_need_no_passage_and_text_does():
    generator, pipeline = scripted("It shines.", retriever=ListRetriever())
    client = client_for(pipeline)
    assert "It shines." in client.post("/v1/chat/completions", json={"messages": HISTORY, **TOOLS}).text
    refused = client.post("/v1/chat/completions", json={"messages": MESSAGES, **TOOLS}).json()
    assert (refused["grounded"], len(generator.prompts)) == (False, 1)
    assert refused["choices"][0]["message"]["content"] != "It shines."


def test_a_stream_is_not_silent_while_a_call_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "PULSE_SECONDS", 0.0)
    client = client_for(scripted(LAMP)[1])
    body = {"model": "default", "messages": MESSAGES, "tools": OPENAI_TOOLS, "max_tokens": 9, "stream": True}
    for path, pulse in (("/v1/chat/completions", ": waiting"), ("/api/chat", " ")):
        text = client.post(path, json=body).text
        # 19 pieces of three characters; none of them is text
        assert text.count(pulse + "\n\n" if pulse.strip() else pulse) >= len(LAMP) // 3
