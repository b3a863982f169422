"""Chat templates that refuse a role, begin prompts in different ways, or end an answer with several tokens."""

from __future__ import annotations

import pytest
import tokenizers
from langchain_core.documents import Document

from rag_posfix.assembly import Assembler, PromptTemplate
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.vocabularies import CONTROLS, chat_template, stock_tokenizer

DOCUMENTS = [Document("Ann built it."), Document("It opened in 1901.")]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]
END = "<end_of_turn>"


def gemma_2():
    """A tokenizer whose template is that of Gemma 2: a system message is refused."""
    tokenizer = stock_tokenizer("gemma", "gemma")
    tokenizer.chat_template = chat_template("gemma-2")
    return tokenizer


def beginning(tokenizer, name):
    """Make a tokenizer put a token before every text, as those of Llama and Gemma do."""
    number = tokenizer.convert_tokens_to_ids(name)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, number)]
    )
    tokenizer.bos_token = name
    return number


def tokens_of(encoder, history=(), **template):
    prompt = PromptTemplate(**template)
    return Assembler(encoder, 4096, prompt).assemble("Who built it?", DOCUMENTS, history=history).layout.token_ids


def test_a_template_that_refuses_a_system_message_serves_shipped_prompts_and_conversations():
    tokenizer = gemma_2()
    encoder = Tokenizer(tokenizer)
    assert tokens_of(encoder).count(tokenizer.convert_tokens_to_ids(END)) == 1
    text = encoder.decode(tokens_of(encoder, HISTORY))
    assert text.index("1901") < text.index("Be brief.") < text.index("Who built it?")
    assert text.count("<start_of_turn>user") == 2


def test_a_system_text_is_refused_with_its_role_and_the_remedy():
    with pytest.raises(ConfigError, match=r"roles system, user: System role not supported; move .* user's"):
        tokens_of(Tokenizer(gemma_2()), system="Be kind.")
    with pytest.raises(ConfigError, match="System role not supported"):
        Assembler(Tokenizer(gemma_2()), 4096).assemble("Who?", history=HISTORY)


def test_no_token_begins_a_prompt_whose_template_writes_none():
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    first = beginning(tokenizer, "<|endoftext|>")
    ids = tokens_of(Tokenizer(tokenizer))
    assert first not in ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize(
    ("vocabulary", "family"), [("llama-3", "llama-3"), ("gemma", "gemma"), ("llama-2", "llama-2")]
)
def test_the_token_that_a_template_writes_first_is_there_once(vocabulary, family):
    tokenizer = stock_tokenizer(vocabulary, family)
    first = beginning(tokenizer, CONTROLS[family][0])
    ids = tokens_of(Tokenizer(tokenizer))
    assert (ids[0], ids.count(first)) == (first, 1)


def test_an_answer_ends_at_the_end_of_the_turn_of_the_tokenizer_and_of_the_generation_config():
    tokenizer = stock_tokenizer("llama-3", "llama-3")
    tokenizer.add_special_tokens({"eos_token": "<|end_of_text|>", "additional_special_tokens": ["<|eom_id|>"]})
    names = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    document, message, turn = (tokenizer.convert_tokens_to_ids(name) for name in names)
    encoder = Tokenizer(tokenizer, eos_ids=[message])
    assert encoder.eos_ids == {document, message, turn}
    answer = encoder.encode_text("Ann")
    assert all(encoder.decode_answer([*answer, end]) == "Ann" for end in encoder.eos_ids)


def test_a_template_that_closes_no_turn_leaves_the_ends_of_the_generation_config():
    tokenizer = stock_tokenizer("llama-3", "glm-4")
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|user|>", "<|system|>")]
    assert Tokenizer(tokenizer, eos_ids=ends).eos_ids == set(ends)
