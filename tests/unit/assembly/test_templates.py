"""Prompt templates as data: shipped ones, files in TOML and Jinja2, and langchain's prompts."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace

import pytest
import tokenizers
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.prompts import PromptTemplate as TextPrompt

from rag_posfix.assembly import Assembler, PromptTemplate, tokenize_passage, tokenize_prompt
from rag_posfix.assembly.templates import merge_messages, read_template, shipped_templates
from rag_posfix.errors import ConfigError
from rag_posfix.generation.model.tokenizer import Tokenizer
from tests.support.stock_prompts import passages_first, stock_ids, turn_of
from tests.support.thinking_templates import THINKING_TEMPLATES
from tests.support.tool_models import THINKING, stock_tool_tokenizer
from tests.support.toy_encoder import ToyEncoder
from tests.support.vocabularies import CONTROLS, chat_template, stock_tokenizer

LANGUAGES = ("", "-de", "-fr", "-es", "-zh", "-ko")


def user_turn(template, question="Who?", title="T", text="Ann."):
    """Return the user's turn of a prompt with one passage."""
    encoder = ToyEncoder()
    prompt = tokenize_prompt(encoder, template, question)
    layout = prompt.with_passages([tokenize_passage(encoder, template, text, title=title)])
    return encoder.decode(layout.token_ids).partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def test_the_shipped_templates_exist_in_six_languages_and_short_is_the_default():
    names = {f"{kind}{language}" for kind in ("short", "full", "citations", "unknown") for language in LANGUAGES}
    assert set(shipped_templates()) == names
    assert read_template("short") == read_template() == PromptTemplate()
    assert len({template.fingerprint() for template in shipped_templates().values()}) == len(names)
    assert user_turn(read_template("unknown-de")).endswith("T\nAnn.\n\nFrage: Who?\nAntwort:")


def test_a_toml_file_has_the_fields_of_the_template(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('instruction = "Read."\nanswer_cue = " A:"\n', encoding="utf-8")
    assert read_template(path) == read_template(str(path)) == PromptTemplate(instruction="Read.", answer_cue=" A:")


def test_a_jinja_file_is_the_turn_of_the_user(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(
        '{% set heading = "# {title}\\n" %}{% set system = "Be kind." %}'
        "{% for rule in ['One.', 'Two.'] %}{{ rule }} {% endfor %}\n{{ passages }}\nQ: {{ question }}\nA:\n",
        encoding="utf-8",
    )
    template = read_template(path)
    assert template == PromptTemplate(
        instruction="One. Two.", heading="# {title}\n", question_prefix="Q: ", answer_cue="\nA:", system="Be kind."
    )
    assert user_turn(template) == "One. Two.\n\n# T\nAnn.\n\nQ: Who?\nA:"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ question }} {{ passages }}", "has the question before the passages"),
        ("{{ passages }} {{ passages }} {{ question }}", "has 2 places for the passages, must have one"),
        ("{% for p in passages %}{{ p.text }}{% endfor %} {{ question }}", "cannot be rendered"),
        ("{{ passages }}", "has 0 places for the question"),
        ("{{ passages }} {{ user }} {{ question }}", "'user' is undefined"),
        ("{{ passages.__class__.__mro__ }} {{ question }}", "unsafe"),
        ("{% set seperator = ' ' %}{{ passages }}{{ question }}", "Did you mean 'separator'"),
        ("{{ passages ", "cannot be rendered"),
    ],
)
def test_a_jinja_program_that_is_no_template_is_rejected(tmp_path, text, message):
    path = tmp_path / "own.j2"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_template(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.toml", "instruction = ", "is not TOML"),
        ("own.toml", 'instructions = "Read."', "Did you mean 'instruction'"),
        ("own.toml", "instruction = 3", "instruction is int, must be a string"),
        ("own.txt", "", "neither a shipped template nor a file"),
        ("missing.toml", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_template(tmp_path / name)


def test_a_prompt_of_langchain_with_the_passages_in_the_turn_of_the_user():
    prompt = ChatPromptTemplate(
        [
            ("system", "Be kind to {name}."),
            ("placeholder", "{chat_history}"),
            ("human", "Read.\n{context}\n\nQ: {input}\nA:"),
        ]
    ).partial(name="Bo")
    assert read_template(prompt) == PromptTemplate(
        system="Be kind to Bo.", instruction="Read.", question_prefix="Q: ", answer_cue="\nA:"
    )


def test_passages_in_a_system_message_of_langchain_move_into_the_turn_of_the_user():
    prompt = ChatPromptTemplate([("system", "Use this:\n\n{context}\n\nBe brief."), ("human", "{question}")])
    assert read_template(prompt) == PromptTemplate(
        instruction="Use this:", question_prefix="Be brief.\n\n", answer_cue=""
    )


def test_a_text_prompt_of_langchain_in_mustache():
    prompt = TextPrompt.from_template("Read.\n\n{{context}}\nQ: {{question}}", template_format="mustache")
    assert read_template(prompt) == PromptTemplate(instruction="Read.", question_prefix="Q: ", answer_cue="")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([("human", "{question}")], "has 0 places for the passages"),
        ([("human", "{context} {question} {input}")], "has 2 places for the question"),
        ([("human", "{context} {question} {name}")], r"has a variable 'name'.*\.partial\(name="),
        ([("human", "{context} {question}"), ("ai", "Yes.")], "has messages of user, assistant"),
        ([("system", "{question}"), ("human", "{context}")], "has the question before the passages"),
    ],
)
def test_a_prompt_of_langchain_needs_one_place_for_the_passages_and_one_for_the_question(messages, message):
    with pytest.raises(ConfigError, match=message):
        read_template(ChatPromptTemplate(messages))


def test_other_objects_are_no_template():
    with pytest.raises(ConfigError, match="template is int"):
        read_template(3)


def test_control_tokens_in_a_template_stay_text():
    encoder = ToyEncoder()
    prompt = tokenize_prompt(encoder, read_template({"instruction": "<|im_end|>"}), "<|im_end|>")
    assert [*prompt.prefix, *prompt.suffix].count(257) == 1  # the end of the turn


def messages(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_repeated_roles_are_joined_by_a_blank_line():
    merged = merge_messages(
        messages(
            ("system", "1"),
            ("system", "2"),
            ("user", "3"),
            ("user", "4"),
            ("assistant", "5"),
            ("assistant", "6"),
            ("user", "7"),
        )
    )
    assert list(merged) == messages(("system", "1\n\n2"), ("user", "3\n\n4"), ("assistant", "5\n\n6"), ("user", "7"))


def test_a_late_system_message_joins_the_first_and_its_neighbours_each_other():
    merged = merge_messages(messages(("user", "1"), ("system", "2"), ("user", "3")))
    assert list(merged) == messages(("system", "2"), ("user", "1\n\n3"))


def test_contents_are_cleaned():
    assert merge_messages(messages(("user", "a\x00\ud800")))[0]["content"] == "a\ufffd\ufffd"


def test_any_word_changes_the_fingerprint():
    template = PromptTemplate()
    changed = [
        replace(template, **{field.name: not field.default if isinstance(field.default, bool) else "{title}."})
        for field in fields(template)
        if field.name != "no_passage"  # the model does not read it
    ]
    assert len({template.fingerprint(), *(each.fingerprint() for each in changed)}) == len(changed) + 1
    assert template.fingerprint() == PromptTemplate().fingerprint()


def test_heading_and_opening():
    assert PromptTemplate().heading_for("{title} x") == "{title} x\n"
    assert PromptTemplate().heading_for("") == ""
    assert PromptTemplate(heading="").heading_for("T") == ""
    assert PromptTemplate(instruction="").opening == ""


def test_a_malformed_template_is_refused():
    with pytest.raises(ConfigError, match=r"must contain '\{title\}'"):
        PromptTemplate(heading="Title:")
    with pytest.raises(ConfigError, match="separator is int"):
        PromptTemplate(separator=3)
    with pytest.raises(ConfigError, match="history_first is str, must be true or false"):
        PromptTemplate(history_first="yes")


# Chat templates that test or change contents get the true ones.


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


@pytest.mark.parametrize(
    "content", ["{{ m.content | tojson }}", "{{ m.content }} ({{ m.content.split() | length }} words)"]
)
def test_a_template_whose_text_cannot_be_followed_warns_once(content, caplog):
    tokenizer = stock_tokenizer("llama-3", "qwen2.5")
    tokenizer.chat_template = loop(content) + OPEN
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


# Chat templates that refuse a role, begin prompts in different ways, or end an answer with several tokens.


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


# Prompts of reasoning models whose conversations hold thoughts, switches and quotes are those of the stock model.


FIRST = PromptTemplate()
THOUGHT = '<think>\nThe text says "1883", not \'84.\n</think>\n\nIn "1883".'
CHANNEL = "<|channel>thought\nHm.<channel|>In 1883."
MARKED = "Steps: one.\n[BEGIN FINAL RESPONSE]\nIn <answer>1883</answer>."
QUESTION = 'who "built" it?'
CONVERSATIONS = {
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
    for name, (turns, question) in CONVERSATIONS.items():
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
