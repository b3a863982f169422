from dataclasses import fields, replace

import pytest

from rag_posfix.assembly.templates import PromptTemplate, merge_messages
from rag_posfix.errors import ConfigError


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
