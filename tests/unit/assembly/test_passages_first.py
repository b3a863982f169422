"""Passages are before everything that changes between turns and users."""

from __future__ import annotations

from rag_posfix.assembly import PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.generation.model.tokenizer import Tokenizer
from rag_posfix.generation.remote.generator import PieceEncoder, messages_of
from tests.support.toy_encoder import ToyEncoder
from tests.support.vocabularies import CONTROLS, stock_tokenizer

SYSTEM = [{"role": "system", "content": "You help Bo."}]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
CONVERSATIONS = ((), SYSTEM, TURNS, [*SYSTEM, *TURNS], [TURNS[1]], [*TURNS, *TURNS, TURNS[0]])

SYSTEM_IN_THE_LAST_TURN = {"mistral-v3", "mistral-tekken"}
"""Templates that write a system message of the prompt template behind the passages from the second turn on."""


def prefixes(encoder, template):
    return {tokenize_prompt(encoder, template, "Who?", history=history).prefix for history in CONVERSATIONS}


def test_the_tokens_before_the_passages_are_the_same_in_every_turn_and_for_every_user():
    cannot = set()
    for name in CONTROLS:
        encoder = Tokenizer(stock_tokenizer("llama-3", name))
        assert len(prefixes(encoder, PromptTemplate())) == 1, name
        if len(prefixes(encoder, PromptTemplate(system="Be kind."))) > 1:
            cannot.add(name)
    assert cannot == SYSTEM_IN_THE_LAST_TURN


def test_the_tokens_before_the_passages_change_with_the_instructions_and_with_history_first():
    encoder = ToyEncoder()
    assert len(prefixes(encoder, PromptTemplate(instruction="Read."))) == 1
    assert prefixes(encoder, PromptTemplate(instruction="Read.")) != prefixes(encoder, PromptTemplate())
    assert len(prefixes(encoder, PromptTemplate(history_first=True))) == len(CONVERSATIONS)


def test_a_server_gets_the_messages_with_the_passages_in_the_first():
    encoder, template = PieceEncoder(), PromptTemplate(instruction="Read.", system="Rules.")
    prompt = tokenize_prompt(encoder, template, "Who?", history=[*SYSTEM, *TURNS])
    layout = prompt.with_passages([tokenize_passage(encoder, template, text) for text in ("Ann.", "Bob.")])
    expected = [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Read.\n\nAnn.\n\nBob.\n\nYou help Bo.\n\nQuestion: Hi\nAnswer:"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Question: Who?\nAnswer:"},
    ]
    assert messages_of(layout, encoder) == expected
    second = expected[1] | {"content": expected[1]["content"].replace("Ann.\n\n", "")}
    assert messages_of(layout.select((1,)), encoder) == [expected[0], second, *expected[2:]]
    none = expected[1] | {"content": second["content"].replace("Bob.\n\n", "")}
    assert messages_of(layout.select(()), encoder) == [expected[0], none, *expected[2:]]
    assert encoder.decode(layout.select((1,)).tokens(layout.select((1,)).question)) == "Who?"


def test_the_fingerprint_of_a_template_is_as_before_unless_history_is_first():
    assert PromptTemplate().fingerprint() == "f5cde3e7ec81e163a6abb47c863c8d8b"
    assert PromptTemplate(history_first=True).fingerprint() != PromptTemplate().fingerprint()
