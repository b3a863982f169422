"""Chat templates that test or change contents get the true ones."""

from __future__ import annotations

import logging

import pytest
from langchain_core.documents import Document

from rag_posfix.assembly import PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.stock_prompts import stock_ids, turn_of
from tests.support.vocabularies import stock_tokenizer

LAST = PromptTemplate(history_first=True)
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def loop(content):
    return f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{content}<|im_end|>\n{{% endfor %}}"


KEPT = "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
TEMPLATES = {
    "deepseek-r1": loop(f"{{% if m.role == 'assistant' and '</think>' in m.content %}}{KEPT}"
                        "{% else %}{{ m.content }}{% endif %}") + OPEN,
    "qwen3": loop("{% if m.role == 'assistant' and '</think>' in m.content %}"
                  "{% if loop.last %}{{ m.content }}{% else %}" + KEPT + "{% endif %}"
                  "{% else %}{{ m.content }}{% endif %}") + OPEN,
    "smollm3": "{% set ns = namespace(mode='/think') %}{% for m in messages %}{% if '/no_think' in m.content %}"
               "{% set ns.mode = '/no_think' %}{% endif %}{% endfor %}"
               "<|im_start|>system\nMode: {{ ns.mode }}<|im_end|>\n" + loop("{{ m.content }}") + OPEN,
    "nemotron": "{% set ns = namespace(think=true) %}{% for m in messages %}{% if '/no_think' in m.content %}"
                "{% set ns.think = false %}{% endif %}{% endfor %}"
                + loop("{{ m.content.replace('/no_think', '').strip() }}")
                + OPEN + "{% if ns.think %}Think.\n{% else %}Be quick.\n{% endif %}",
    "last sign": loop("{{ m.content | trim }}{% if not m.content.endswith('?') %}.{% endif %}") + OPEN,
    "length": loop("{% if m.content | length > 10 %}[long] {% endif %}{{ m.content }}") + OPEN,
}  # fmt: skip

THOUGHTS = [
    {"role": "user", "content": "When was it lit?"},
    {"role": "assistant", "content": '<think>\nThe text says "1883".\n</think>\n\nIn 1883.'},
]
SWITCH = [{"role": "user", "content": "Hi /no_think"}, {"role": "assistant", "content": 'Hello, "you".'}]
CHATS = {
    "thoughts": (THOUGHTS, "who built it?"),
    "switch before": (SWITCH, "who built it?"),
    "switch now": ([], "who built it? /no_think"),
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_look_into_messages_write_what_they_write_for_the_stock_tokenizer(name, chat, caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = TEMPLATES[name]
    encoder, (history, question) = Tokenizer(tokenizer), CHATS[chat]
    passages = [tokenize_passage(encoder, LAST, "Ann built it.")]
    asked = tokenize_prompt(encoder, LAST, question, history=history).with_passages(passages)
    plain = tokenize_prompt(encoder, LAST, question, history=history, has_passages=False).with_passages(())
    assert list(plain.token_ids) == stock_ids(tokenizer, question, history)
    assert list(asked.token_ids) == stock_ids(tokenizer, turn_of(passages, question), history)
    assert encoder.decode(asked.tokens(asked.question)).strip() in question
    assert not caplog.records


def test_a_template_whose_text_cannot_be_followed_warns_once(caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = loop("{{ m.content | tojson }}") + OPEN
    encoder = Tokenizer(tokenizer)
    passages = [tokenize_passage(encoder, LAST, Document("Ann.").page_content)]
    with caplog.at_level(logging.WARNING):
        texts = [encoder.decode(tokenize_prompt(encoder, LAST, "who?").with_passages(passages).token_ids)] * 2
    assert [record.getMessage()[:34] for record in caplog.records] == ["the chat template writes other tex"]
    assert "u001f" not in texts[1]


def test_a_template_that_counts_the_words_of_passages_warns_once(caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = loop("{{ m.content }} ({{ m.content.split() | length }} words)") + OPEN
    encoder = Tokenizer(tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokenize_prompt(encoder, LAST, "who?")
    assert [record.getMessage()[:34] for record in caplog.records] == ["the chat template writes other tex"]


def test_a_content_that_the_template_refuses_is_an_error_with_its_reason():
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    refusal = "{% if 'who' in m.content %}{{ raise_exception('no names') }}{% endif %}"
    tokenizer.chat_template = loop(refusal + "{{ m.content }}") + OPEN
    with pytest.raises(ConfigError, match="refused messages with the roles user: no names"):
        tokenize_prompt(Tokenizer(tokenizer), LAST, "who?")
