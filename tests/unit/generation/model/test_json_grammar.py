"""Masks of JSON texts: whatever allowed tokens are chosen, the text follows the schema, of all tokenizers."""

from __future__ import annotations

import json
import random
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from rag_posfix.errors import ConfigError, UnsupportedModelError
from rag_posfix.generation.model import json_grammar
from rag_posfix.generation.model.json_grammar import JsonGrammars, compile_schema, drop_unknown_formats
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.vocabularies import VOCABULARIES, stock_tokenizer


class Colour(Enum):
    RED = "red"
    SEA = "sea green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(max_length=6)


class House(BaseModel):
    colour: Colour
    pets: list[Cat | Dog] = Field(max_length=2)
    owner: Dog | None
    known: bool


SCHEMA = json.dumps(House.model_json_schema())


def test_a_format_that_is_not_known_is_an_annotation_and_a_known_one_is_enforced():
    named = {
        "type": "object",
        "properties": {"format": {"type": "string"}, "at": {"type": "string", "format": "time"}},
    }
    assert drop_unknown_formats(named) == named
    unknown = {"anyOf": [{"type": "string", "format": "password"}], "default": {"format": "password"}}
    assert drop_unknown_formats(unknown) == {"anyOf": [{"type": "string"}], "default": {"format": "password"}}
    for name in ("password", "idn-email", "x-of-my-own"):
        compile_schema(json.dumps({"type": "object", "properties": {"a": {"type": "string", "format": name}}}))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_any_allowed_tokens_make_a_text_that_follows_the_schema(vocabulary):
    tokenizer = Tokenizer(stock_tokenizer(vocabulary, "llama-3"))
    if vocabulary == "unigram":  # trained on prose, without bytes for what it never saw
        with pytest.raises(UnsupportedModelError, match="has no token for"):
            tokenizer.json_grammars.begin(SCHEMA)
        return
    draw = random.Random(7)
    for _ in range(5):
        text, ids = tokenizer.json_grammars.begin(SCHEMA), []
        while not text.is_complete:
            allowed = [token for token, value in enumerate(text.allowed()) if value]
            assert not tokenizer.eos_ids & set(allowed), "it may not end before it is complete"
            ids.append(draw.choice(allowed))
            text.append(ids[-1])
            assert len(ids) < 500
        House.model_validate_json(tokenizer.decode_answer(ids))


@pytest.mark.parametrize(
    "part",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "nonsense"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
    ],
)
def test_what_cannot_be_enforced_is_refused(part):
    with pytest.raises(ConfigError, match="cannot be enforced"):
        compile_schema(json.dumps({"type": "object", "properties": {"part": part}}))


def test_an_object_has_no_properties_but_those_it_names_unless_it_says_so():
    closed = json_grammar.close_objects({"properties": {"a": {"properties": {}}}, "allOf": [{"properties": {}}]})
    assert closed == {
        "properties": {"a": {"properties": {}, "additionalProperties": False}},
        "allOf": [{"properties": {}}],
    }
    assert json_grammar.close_objects({"properties": {}, "additionalProperties": True})["additionalProperties"] is True


def test_without_the_package_or_a_token_that_ends_it_says_what_to_do(monkeypatch):
    with pytest.raises(UnsupportedModelError, match="no token that ends"):
        JsonGrammars(list, list, (), ()).begin(SCHEMA)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"\.\[structured\]"):
        compile_schema(SCHEMA)


NAMES = [f"p{number}" for number in range(1001)]
OPEN = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": dict.fromkeys(NAMES, OPEN)}, "1001 properties, at most 1000"),
        # 2 * 500 names of two objects, and the two names "a" and "b".
        ({"properties": {name: {"properties": dict.fromkeys(NAMES[:500], OPEN)} for name in "ab"}}, "1002 properties"),
        ({"$defs": dict.fromkeys(NAMES, OPEN)}, "1001 properties"),
        ({"enum": list(range(5001))}, "5001 values of enumerations, at most 5000"),
        ({"const": "x" * 70_000}, "at most 65536"),
        # 2 ** 9 = 512.
        ({"allOf": [{"anyOf": [OPEN, {"type": "null"}]}] * 9}, "512 combinations of alternatives, at most 256"),
        # 3 * 3 * 3 * 10 = 270: what is beside an allOf holds too, and a reference stands for its schema.
        (
            {
                "allOf": [{"$ref": "#/$defs/three"}] * 3,
                "oneOf": [OPEN] * 10,
                "$defs": {"three": {"anyOf": [OPEN] * 3}},
            },
            "270 combinations",
        ),
        ({"allOf": [{"anyOf": [OPEN] * 10}] * 300}, "over a million combinations"),
    ],
)
def test_a_schema_that_would_compile_for_seconds_is_refused(schema, told, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", SimpleNamespace(LLMatcher=None))  # nothing is compiled
    with pytest.raises(ConfigError, match=told):
        compile_schema(json.dumps({"type": "object", **schema}))


def test_a_schema_that_refers_to_itself_is_compiled():
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}}}}
    assert compile_schema(json.dumps(tree))


def test_a_schema_nested_beyond_the_stack_is_refused():
    with pytest.raises(ConfigError, match="cannot be enforced"):
        compile_schema('{"not":' * 100_000)


def test_a_schema_that_was_checked_is_not_compiled_again(monkeypatch):
    grammars = Tokenizer(stock_tokenizer(VOCABULARIES[0], "llama-3")).json_grammars
    grammars.check(SCHEMA)
    monkeypatch.setattr(json_grammar, "compile_schema", lambda schema: pytest.fail("it was compiled"))
    first, second = grammars.begin(SCHEMA), grammars.begin(SCHEMA)
    first.append(next(token for token, value in enumerate(first.allowed()) if value))
    assert first.allowed() != second.allowed() == grammars.begin(SCHEMA).allowed()
