"""Prompt templates as data: shipped ones, files in TOML and Jinja2, and langchain's prompts."""

from __future__ import annotations

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.prompts import PromptTemplate as TextPrompt

from rag_posfix.assembly.templates import read_template, shipped_templates
from rag_posfix.assembly.tokenization import tokenize_passage, tokenize_prompt
from rag_posfix.contracts.request import PromptTemplate
from rag_posfix.errors import ConfigError
from tests.support.toy_encoder import ToyEncoder

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
