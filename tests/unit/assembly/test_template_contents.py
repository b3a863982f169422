"""Chat templates that test or change contents get the true ones."""

from __future__ import annotations

import logging

import pytest

from rag_posfix.assembly import PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.stock_prompts import stock_ids, turn_of
from tests.support.vocabularies import stock_tokenizer

LAST = PromptTemplate(history_first=True)
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def loop(content):
    return f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{content}<|im_end|>\n{{% endfor %}}"


TEMPLATES = {
    "last sign": loop("{{ m.content | trim }}{% if not m.content.endswith('?') %}.{% endif %}") + OPEN,
    "length": loop("{% if m.content | length > 10 %}[long] {% endif %}{{ m.content }}") + OPEN,
}  # fmt: skip

SWITCH = [{"role": "user", "content": "Hi /no_think"}, {"role": "assistant", "content": 'Hello, "you".'}]
CHATS = {
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


@pytest.mark.parametrize("content", ["{{ m.content | tojson }}", "{{ m.content.split() | length }} words"])
def test_a_template_whose_text_cannot_be_followed_warns_once(content, caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = loop("{{ m.content }}" + content) + OPEN
    encoder = Tokenizer(tokenizer)
    with caplog.at_level(logging.WARNING):
        texts = [encoder.decode(tokenize_prompt(encoder, LAST, "who?").with_passages([]).token_ids) for _ in range(2)]
    assert [record.getMessage()[:34] for record in caplog.records] == ["the chat template writes other tex"]
    assert "u001f" not in texts[1]


def test_a_content_that_the_template_refuses_is_an_error_with_its_reason():
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    refusal = "{% if 'who' in m.content %}{{ raise_exception('no names') }}{% endif %}"
    tokenizer.chat_template = loop(refusal + "{{ m.content }}") + OPEN
    with pytest.raises(ConfigError, match="refused messages with the roles user: no names"):
        tokenize_prompt(Tokenizer(tokenizer), LAST, "who?")
