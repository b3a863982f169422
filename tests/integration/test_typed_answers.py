"""Answers by a schema: plain, pooled, streamed, batched, in langchain and over HTTP."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from enum import Enum
from typing import Annotated

import ollama
import openai
import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel, Field

from rag_posfix import MitigationChoice, Question, RagPosfixChatModel, Sampling, Settings, build_pipeline
from rag_posfix.errors import ConfigError, UnsupportedModelError
from tests.support.serving import make_pipeline, serving
from tests.support.tool_models import tool_engine

DOCUMENTS = [
    Document(page_content=f"The {name} lighthouse was designed by {who} and first lit in {year}.", id=name.lower())
    for name, who, year in (("Torvane", "Anders Wick", 1883), ("Maravel", "Ilse Korvanth", 1871))
]
TOKENS = 96
"""More than the longest answer of the schema takes: the random model ends when the schema does."""
TEXT = "When was the Maravel lighthouse first lit?"


class Kind(Enum):
    LIGHTHOUSE = "lighthouse"
    BRIDGE = "bridge"


class Place(BaseModel):
    name: str = Field(max_length=8)
    kind: Kind


class Fact(BaseModel):
    place: Place
    years: list[Annotated[int, Field(ge=1000, le=2100)]] = Field(min_length=1, max_length=1)


SCHEMA = Fact.model_json_schema()
FORBIDDEN = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.fixture(scope="module")
def random_engine():
    """A random model: the schema alone makes sense of what it writes."""
    return tool_engine()


@pytest.fixture(scope="module")
def pipeline(random_engine, tmp_path_factory):
    settings = Settings(cache_dir=tmp_path_factory.mktemp("cache"), max_tokens=TOKENS)
    with closing(build_pipeline(settings, generator=random_engine)) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def client(pipeline):
    with serving(pipeline) as url, openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
        yield client


def question(schema=SCHEMA, method="none", **fields):
    sampling = Sampling(max_tokens=TOKENS, json_schema=schema)
    return Question(TEXT, DOCUMENTS, mitigation=MitigationChoice(method), sampling=sampling, **fields)


@pytest.mark.parametrize("method", ["none", "default"])
@pytest.mark.slow
def test_the_answer_follows_the_schema_plain_streamed_and_among_others(pipeline, method):
    answer = pipeline.ask(question(method=method, use_cache=False))
    fact = Fact.model_validate_json(answer.text)
    assert (answer.finish_reason, answer.form_fault) == ("stop", None)
    assert "".join(chunk.text for chunk in pipeline.stream(question(method=method, use_cache=False))) == answer.text
    free = Question(
        TEXT, DOCUMENTS, mitigation=MitigationChoice(method), sampling=Sampling(max_tokens=4), use_cache=False
    )
    first, text, last = pipeline.batch(
        [question(method=method, use_cache=False), free, question(method=method, use_cache=False)]
    )
    assert Fact.model_validate_json(first.text) == Fact.model_validate_json(last.text) == fact
    assert not text.text.startswith("{")


@pytest.mark.slow
@pytest.mark.weights
def test_the_real_model_fills_the_schema_from_the_passages(engine, tmp_path):
    settings = Settings(cache_dir=tmp_path, max_tokens=TOKENS)
    with closing(build_pipeline(settings, generator=engine)) as pipeline:
        for method in ("none", "default"):
            fact = Fact.model_validate_json(pipeline.ask(question(method=method)).text)
            assert fact.place.kind is Kind.LIGHTHOUSE


def test_the_cache_keeps_answers_of_different_schemas_apart(pipeline):
    year = {
        "type": "object",
        "properties": {"year": {"type": "integer", "minimum": 1000, "maximum": 2100}},
        "required": ["year"],
    }
    assert pipeline.ask(question(year)).cached is False
    again = pipeline.ask(question(json.dumps(year)))
    assert (again.cached, set(json.loads(again.text))) == (True, {"year"})
    assert pipeline.ask(question({**year, "title": "Year"})).cached is False


def test_what_cannot_be_enforced_is_refused_before_the_model_is_asked(pipeline):
    with pytest.raises(ConfigError, match="cannot be enforced"):
        pipeline.stream(question(FORBIDDEN))
    with pytest.raises(UnsupportedModelError, match="writes no JSON"):
        make_pipeline().ask(question())
    with pytest.raises(ConfigError, match="json_schema is no JSON"):
        Sampling(json_schema="{")


FIELDS = {
    "model": "default",
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": TOKENS,
    "extra_body": {"documents": [{"text": document.page_content} for document in DOCUMENTS]},
}


class TestLangchain:
    def test_it_returns_objects_of_the_class_or_dicts_of_a_schema(self, random_engine):
        model = RagPosfixChatModel(generator=random_engine, mitigation="none", max_tokens=TOKENS)
        fact = model.with_structured_output(Fact).bind(documents=DOCUMENTS).invoke(TEXT)
        assert isinstance(fact, Fact)
        assert model.with_structured_output(SCHEMA, include_raw=True).invoke(TEXT)["parsed"]["place"]["kind"]

    def test_an_answer_that_is_cut_is_an_error_of_the_parser(self, random_engine):
        model = RagPosfixChatModel(generator=random_engine, mitigation="none", max_tokens=3)
        with pytest.raises(OutputParserException):
            model.with_structured_output(Fact).invoke(TEXT)
        raw = asyncio.run(model.with_structured_output(Fact, include_raw=True).ainvoke(TEXT))
        assert raw["parsed"] is None
        assert isinstance(raw["parsing_error"], OutputParserException)
        assert raw["raw"].content[:2] == '{"'
        assert '{"place": '.startswith(raw["raw"].content)

    def test_what_it_cannot_do_is_refused_when_it_is_made(self):
        model = RagPosfixChatModel()
        with pytest.raises(ConfigError, match="cannot be enforced"):
            model.with_structured_output(FORBIDDEN)
        with pytest.raises(UnsupportedModelError, match="method='function_calling'"):
            model.with_structured_output(Fact, method="function_calling")
        with pytest.raises(ConfigError, match="give a Pydantic class"):
            model.with_structured_output(7)
        with pytest.raises(UnsupportedModelError, match="writes no JSON"):
            RagPosfixChatModel(generator=make_pipeline().generator).with_structured_output(Fact)


class TestHTTP:
    def test_the_client_parses_the_answer_whole_and_streamed(self, client):
        completion = client.chat.completions.parse(**FIELDS, response_format=Fact)
        assert isinstance(completion.choices[0].message.parsed, Fact)
        with client.chat.completions.stream(**FIELDS, response_format=Fact) as stream:
            parsed = stream.get_final_completion().choices[0].message.parsed
        assert parsed == completion.choices[0].message.parsed

    @pytest.mark.parametrize(
        "form",
        [
            {"type": "json_schema", "json_schema": {"name": "a", "schema": FORBIDDEN}},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_what_cannot_be_enforced_is_400_before_anything_is_sent(self, client, form, stream):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**FIELDS, response_format=form, stream=stream)

    def test_the_client_of_responses_parses_the_answer(self, client):
        fields = {"model": "default", "input": TEXT, "max_output_tokens": TOKENS, "extra_body": FIELDS["extra_body"]}
        response = client.responses.parse(**fields, text_format=Fact)
        assert isinstance(response.output_parsed, Fact)
        assert (
            response.text.format.schema_
            == client.responses.create(
                **fields, text={"format": response.text.format.model_dump(by_alias=True, exclude_none=True)}
            ).text.format.schema_
        )
        with client.responses.stream(**fields, text_format=Fact) as stream:
            assert stream.get_final_response().output_parsed == response.output_parsed
        form = {"type": "json_schema", "name": "a", "schema": FORBIDDEN}
        with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
            client.responses.create(**fields, text={"format": form})

    def test_ollamas_format_is_a_schema_or_json(self, client):
        with ollama.Client(host=str(client.base_url).removesuffix("/v1/")) as asked:
            fields = {"model": "default", "options": {"num_predict": TOKENS}}
            chat = {**fields, "messages": FIELDS["messages"]}
            text = asked.chat(**chat, format=SCHEMA).message.content
            assert Fact.model_validate_json(text)
            assert "".join(part.message.content for part in asked.chat(**chat, format=SCHEMA, stream=True)) == text
            assert asked.generate(**fields, prompt=TEXT, format="json").response.startswith("{")
            with pytest.raises(ollama.ResponseError, match="cannot be enforced") as refused:
                asked.chat(**chat, format=FORBIDDEN)
            assert refused.value.status_code == 400
