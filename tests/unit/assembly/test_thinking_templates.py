"""Prompts of reasoning models whose conversations hold thoughts, switches and quotes are those of the stock model."""

from __future__ import annotations

import json

import pytest

from rag_posfix.assembly import PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.stock_prompts import passages_first, stock_ids, turn_of
from tests.support.thinking_templates import THINKING_TEMPLATES
from tests.support.tool_models import THINKING, stock_tool_tokenizer
from tests.support.vocabularies import stock_tokenizer

FIRST, LAST = PromptTemplate(), PromptTemplate(history_first=True)
THOUGHT = '<think>\nThe text says "1883", not \'84.\n</think>\n\nIn "1883".'
CHANNEL = "<|channel>thought\nHm.<channel|>In 1883."
MARKED = "Steps: one.\n[BEGIN FINAL RESPONSE]\nIn <answer>1883</answer>."
QUESTION = 'who "built" it?'
CHATS = {
    "thoughts": ([("user", "When was it lit?"), ("assistant", THOUGHT)], QUESTION),
    "thoughts twice": (
        [("user", "Hi"), ("assistant", THOUGHT), ("user", "And then?"), ("assistant", THOUGHT + " </think> end")],
        QUESTION,
    ),
    "channels": ([("user", "Hi"), ("assistant", CHANNEL)], QUESTION),
    "marks": ([("user", "Hi"), ("assistant", MARKED)], QUESTION),
    "switch of the system": ([("system", "Be brief. /no_think"), ("user", "Hi"), ("assistant", THOUGHT)], QUESTION),
    "switch before": ([("user", "Hi /no_think"), ("assistant", '{"a": "b\\n"}')], QUESTION),
    "switch now": ([], "who built it? /no_think"),
    "switch at the end of a question": ([("user", "Hi"), ("assistant", "Hello")], "who built it?/nothink"),
}


@pytest.mark.parametrize("family", THINKING_TEMPLATES)
def test_conversations_of_reasoning_models_have_the_tokens_of_the_stock_model(family, caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = THINKING_TEMPLATES[family]
    encoder = Tokenizer(tokenizer)
    passages = [tokenize_passage(encoder, LAST, "Ann built it.")]
    for name, (turns, question) in CHATS.items():
        history = [{"role": role, "content": content} for role, content in turns]
        plain = tokenize_prompt(encoder, LAST, question, history=history, has_passages=False).with_passages(())
        assert list(plain.token_ids) == stock_ids(tokenizer, question, history), name
        asked = tokenize_prompt(encoder, LAST, question, history=history).with_passages(passages)
        assert list(asked.token_ids) == stock_ids(tokenizer, turn_of(passages, question), history), name
        if len(history) == 3:
            first = tokenize_prompt(encoder, FIRST, question, history=history).with_passages(passages)
            *earlier, last = passages_first(passages, question, history)
            assert list(first.token_ids) == stock_ids(tokenizer, last["content"], earlier), name
    assert not caplog.records


def test_thoughts_before_calls_of_tools_are_left_out_as_by_the_stock_model(caplog):
    tokenizer = stock_tool_tokenizer(THINKING)
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
    encoder = Tokenizer(tokenizer).with_tools([tool])
    call = {"type": "function", "id": "1", "function": {"name": "lookup", "arguments": {"name": 'Gray "Rock"'}}}
    written = {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
    turns = [("user", "Hi"), ("assistant", THOUGHT)]
    history = [{"role": role, "content": content} for role, content in turns]
    result = {"role": "tool", "content": 'He said "1871"', "tool_call_id": "1", "name": "lookup"}
    for thought in (THOUGHT, "<think>\nI look.\n</think>\n\n", ""):
        calling = {"role": "assistant", "content": thought}
        tool_turns = [{**calling, "tool_calls": json.dumps([written])}, result]
        given = {"history": history, "tool_turns": tool_turns}
        prompt = tokenize_prompt(encoder, LAST, QUESTION, **given, has_passages=False).with_passages(())
        messages = [*history, {"role": "user", "content": QUESTION}, {**calling, "tool_calls": [call]}, result]
        text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
        assert encoder.decode(prompt.token_ids) == text
        assert encoder.decode(prompt.tokens(prompt.question)) == QUESTION
    assert not caplog.records
