"""Prompt templates as data: the shipped ones by name, files in TOML and Jinja2, and langchain's prompts.

Messages are in a form that every chat template accepts. Knows no tokens.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.contracts.request import BLANK_LINE as BLANK_LINE
from rag_posfix.contracts.request import PromptTemplate as PromptTemplate
from rag_posfix.errors import ConfigError, missing_extra
from rag_posfix.parameters import shown
from rag_posfix.registry import check_names
from rag_posfix.text import clean_text

JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")

PASSAGES, QUESTION = "\ue000passages\ue001", "\ue000question\ue001"
"""What passages and question are while a prompt of another kind is rendered; no prompt contains these characters."""

_PASSAGES_NAMES = ("context", "documents", "passages")
_QUESTION_NAMES = ("question", "input", "query")

_FIELDS = {field.name: field.default for field in fields(PromptTemplate)}


def read_template(template: object = None, *, history_first: bool = False) -> PromptTemplate:
    """Return a prompt template from any of its forms.

    Args:
        template: None (the default), a ``PromptTemplate``, the name of a shipped one, a file (``.toml`` with its
            fields, or Jinja2), a mapping of its fields, or a prompt of langchain with one place for the passages
            (``context``, ``documents`` or ``passages``) and one for the question (``question``, ``input``, ``query``).
        history_first: Whether the passages are in the last turn, whatever the template says.

    Raises:
        ConfigError: the name is unknown, the file cannot be read, or the prompt cannot be expressed as a template.
    """
    if history_first:
        return replace(read_template(template), history_first=True)
    if template is None:
        return PromptTemplate()
    if isinstance(template, PromptTemplate):
        return template
    if isinstance(template, Mapping):
        return _from_fields(template, "prompt template")
    if isinstance(template, str) and template in shipped_templates():
        return shipped_templates()[template]
    if isinstance(template, str | Path):
        return _read_file(Path(template))
    return _from_langchain(template)


@functools.cache
def shipped_templates() -> Mapping[str, PromptTemplate]:
    """Return the shipped templates by name: ``short`` (the default), ``full``, ``short-de``, ..."""
    tables = tomllib.loads(files(__package__).joinpath("templates.toml").read_text(encoding="utf-8"))
    return {name: _from_fields(table, name) for name, table in tables.items()}


def templates_by_language(
    template: str, own: Mapping[str, str], *, history_first: bool = False
) -> Mapping[str, PromptTemplate]:
    """Return the templates for questions in other languages, by language code.

    Args:
        template: The template of all other questions. A shipped one in English, such as ``short``, has its
            translations; any other has none.
        own: Names or files by language code, which come first.
        history_first: As for ``read_template``.

    Raises:
        ConfigError: a name is unknown, or a file cannot be read.
    """
    shipped = {
        name.removeprefix(f"{template}-"): name for name in shipped_templates() if name.startswith(f"{template}-")
    }
    return {code: read_template(name, history_first=history_first) for code, name in (shipped | dict(own)).items()}


def _from_fields(values: Mapping[str, Any], source: str) -> PromptTemplate:
    check_names(source, values, _FIELDS)
    return PromptTemplate(**values)


def _read_file(path: Path) -> PromptTemplate:
    if path.suffix not in (".toml", *JINJA_SUFFIXES):
        raise ConfigError(
            f"template={str(path)!r} is neither a shipped template nor a file in TOML or Jinja2; use one of "
            f"{', '.join(shipped_templates())}, or a file that ends in .toml, {', '.join(JINJA_SUFFIXES)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"template {str(path)!r} cannot be read: {error}; give a file of UTF-8 text") from error
    if path.suffix != ".toml":
        return _from_jinja(text, str(path))
    try:
        return _from_fields(tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"template {str(path)!r} is not TOML: {error}") from error


def _from_jinja(text: str, source: str) -> PromptTemplate:
    """Return the template of a Jinja2 program, the user's turn; variables that it sets are further fields.

    The program runs once, in a sandbox, with a mark in the place of passages and question.
    """
    try:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise missing_extra(error.name or "jinja2", "local") from error
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    try:
        module = environment.from_string(text).make_module({"passages": PASSAGES, "question": QUESTION})
        rendered = str(module)
    # A program raises what it likes.
    except Exception as error:
        raise ConfigError(
            f"template {source!r} cannot be rendered: {error}; it may use {{{{ passages }}}}, {{{{ question }}}} and "
            "variables that it sets"
        ) from error
    names = [name for name in vars(module) if not name.startswith("_")]
    check_names(
        f"template {source!r}",
        dict.fromkeys(names),
        dict.fromkeys(("heading", "separator", "system", "history_first")),
    )
    return _from_messages([("user", rendered)], source, {name: getattr(module, name) for name in names})


def _from_langchain(prompt: Any) -> PromptTemplate:
    from langchain_core.prompts import BaseChatPromptTemplate, BasePromptTemplate, MessagesPlaceholder

    kind = type(prompt).__name__
    if not isinstance(prompt, BasePromptTemplate):
        raise ConfigError(
            f"template is {kind}; give a PromptTemplate, a name, a file, a mapping of fields or a prompt of langchain"
        )
    messages = getattr(prompt, "messages", ())
    history = {message.variable_name for message in messages if isinstance(message, MessagesPlaceholder)}
    values: dict[str, Any] = {name: [] for name in history}
    for name in set(prompt.input_variables) - history:
        if name not in (*_PASSAGES_NAMES, *_QUESTION_NAMES):
            raise ConfigError(
                f"{kind} has a variable {shown(name)}; passages are one of {', '.join(_PASSAGES_NAMES)}, the question "
                f"is one of {', '.join(_QUESTION_NAMES)}: fill any other with .partial({name}=...)"
            )
        values[name] = PASSAGES if name in _PASSAGES_NAMES else QUESTION
    if not isinstance(prompt, BaseChatPromptTemplate):
        return _from_messages([("user", str(prompt.format(**values)))], kind)
    roles = {"human": "user", "ai": "assistant"}
    written = [(roles.get(m.type, m.type), str(m.text)) for m in prompt.format_messages(**values)]
    return _from_messages(written, kind)


def _from_messages(
    messages: Sequence[tuple[str, str]], source: str, other_fields: Mapping[str, Any] | None = None
) -> PromptTemplate:
    """Return the template of a rendered prompt: system messages, if any, and the user's.

    Passages of a system message move into the user's turn with the text around them: chat templates write the system
    message before all turns, but a user's turn holds the passages of a ``PromptTemplate``.
    """
    roles = [role for role, _ in messages]
    if not roles or roles[-1] != "user" or any(role != "system" for role in roles[:-1]):
        raise ConfigError(
            f"template {source!r} has messages of {', '.join(roles) or 'nobody'}; it must have one message of the "
            "user, after system messages and a place for the history, if any"
        )
    system, user = BLANK_LINE.join(text for _, text in messages[:-1]), messages[-1][1]
    for mark, name in ((PASSAGES, "the passages"), (QUESTION, "the question")):
        count = system.count(mark) + user.count(mark)
        if count != 1:
            raise ConfigError(f"template {source!r} has {count} places for {name}, must have one; write it once")
    if PASSAGES in system:
        system, user = "", system + BLANK_LINE + user
    before, _, after = user.partition(PASSAGES)
    if QUESTION in system + before:
        raise ConfigError(
            f"template {source!r} has the question before the passages; write it after them, so that the keys and "
            "values of passages do not depend on the question"
        )
    prefix, _, cue = after.partition(QUESTION)
    values: dict[str, Any] = {
        "instruction": before.strip(),
        "question_prefix": prefix.lstrip(),
        "answer_cue": cue.rstrip(),
    }
    if system:
        values["system"] = system
    return PromptTemplate(**values, **(other_fields or {}))


ROLES = ("system", "user", "assistant")


def merge_messages(messages: Sequence[ChatMessage], *, with_tools: bool = False) -> tuple[ChatMessage, ...]:
    """Return the messages with at most one system message, at the start, and no role twice in a row.

    Many chat templates raise on anything else. Merged contents are joined by a blank line; all are cleaned. With
    ``with_tools`` there may be results of tools, and calls, which are not merged with other messages.

    Raises:
        ConfigError: a role is unknown, or a content is no string.
    """
    system: list[str] = []
    turns: list[tuple[ChatMessage, list[str]]] = []  # contents are joined at the end: in linear time
    for index, message in enumerate(messages):
        role, content = _check_message(message, index, (*ROLES, "tool") if with_tools else ROLES)
        is_of_tools = with_tools and (role == "tool" or "tool_calls" in message)
        if role == "system":
            system.append(content)
        elif is_of_tools:
            turns.append((message, [content]))
        elif turns and turns[-1][0]["role"] == role and "tool_calls" not in turns[-1][0]:
            turns[-1][1].append(content)
        else:
            turns.append(({"role": role}, [content]))
    if system:
        turns.insert(0, ({"role": "system"}, system))
    return tuple({**message, "content": BLANK_LINE.join(contents)} for message, contents in turns)


def _check_message(message: ChatMessage, index: int, roles: Sequence[str]) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    if role is None or role not in roles:
        raise ConfigError(f"message {index}: role {role!r} is not supported; use one of {', '.join(roles)}")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise ConfigError(f"message {index} ({role}): content is {kind}, must be a string; join its text parts")
    return role, clean_text(content)
