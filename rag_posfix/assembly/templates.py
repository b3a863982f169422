"""Prompt templates as data: the shipped ones by name, files in TOML and Jinja2, and langchain's prompts.

Messages are in a form that every chat template accepts. Knows no tokens.

Where a chat template writes each content, for templates that look into messages.

Tools as a chat template writes them: found by rendering a call; calls are read from what the model writes.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

from rag_posfix.cancellation import check_cancelled
from rag_posfix.contracts.generator import (
    ChatMessage,
    Generator,
    TokenEncoder,
    display_name,
)
from rag_posfix.contracts.request import BLANK_LINE as BLANK_LINE
from rag_posfix.contracts.request import PromptTemplate as PromptTemplate
from rag_posfix.errors import ConfigError, UnsupportedModelError, missing_extra
from rag_posfix.parameters import shown
from rag_posfix.plan.layout import Span
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


_log = logging.getLogger(__name__)

_MARK, _END = "\ue002", "\ue003"
"""No chat template writes these characters."""

_MAX_MESSAGES = 256
"""Of a conversation whose contents are looked for: the cost grows with the square of their number."""

_warned: WeakSet[TokenEncoder] = WeakSet()
_probed: WeakSet[TokenEncoder] = WeakSet()
_PROBE = "A passage of some words, and of two lines.\nIt is the second.\n\n"


def written_contents(
    encoder: TokenEncoder, messages: Sequence[ChatMessage], numbers: Sequence[int], filled: str
) -> tuple[str, list[Span]] | None:
    """Return the chat template's own rendering of ``messages``, and where in it the contents of ``numbers`` are.

    A template that leaves out thoughts of earlier turns, or obeys a switch in a message, writes other text for the
    true contents than for placeholders. A content is found by rendering the other messages truly, and it marked.

    Cost: two renderings per message, and none of them if ``filled`` is what the template writes.

    Args:
        filled: The rendering of placeholders, filled with the contents.

    Returns:
        None if ``filled`` is what the template writes, or if the places cannot be told, which logs a warning.

    Raises:
        ConfigError: the template refuses a content.
    """
    try:
        rendered = encoder.render_chat(messages, open_answer=True)
    except ConfigError:
        if all(messages[number]["content"].strip() for number in numbers):
            raise
        warn_once(encoder)  # passages may fill what is empty
        return None
    if rendered == filled:
        return None
    try:
        spans = [_find(encoder, messages, n, rendered) for n in numbers if len(messages) <= _MAX_MESSAGES]
    except ConfigError:  # it refuses a content that is marked
        spans = [None]
    found = [span for span in spans if span is not None]
    if len(found) == len(numbers) and all(a.stop <= b.start for a, b in pairwise(found)):
        return rendered, found
    warn_once(encoder)
    return None


def probe_passages(encoder: TokenEncoder, messages: Sequence[ChatMessage], place: int, offset: int, text: str) -> None:
    """Warn if the chat template writes passages otherwise than as they are, or other text around them.

    Passages are encoded without the template, so one that counts or changes their words cannot be followed. Cost: one
    rendering for the first prompt of an encoder.

    Args:
        place: The message with the passages.
        offset: Where in its content they are.
        text: The rendering of ``messages``, which have none.
    """
    if encoder in _probed:
        return
    _probed.add(encoder)
    content = messages[place]["content"]
    changed = [*messages]
    changed[place] = {**changed[place], "content": content[:offset] + _PROBE + content[offset:]}
    try:
        written = encoder.render_chat(changed, open_answer=True)
    except ConfigError:
        written = ""
    if written.count(_PROBE) != 1 or written.replace(_PROBE, "") != text:
        warn_once(encoder)


def warn_once(encoder: TokenEncoder) -> None:
    """Log that prompts of ``encoder`` may differ from those of the stock model."""
    if encoder not in _warned:
        _warned.add(encoder)
        _log.warning(
            "the chat template writes other text for these messages than around placeholders (it tests or changes "
            "contents), so the prompt differs from the stock model's; take switches such as /no_think out of "
            "messages, or use another chat template"
        )


def _find(encoder: TokenEncoder, messages: Sequence[ChatMessage], index: int, rendered: str) -> Span | None:
    """Return where ``rendered`` has the content of a message; None if it cannot be told."""
    check_cancelled()
    content = messages[index]["content"]
    # Around a content, marks leave its switches to the template; alone, they are in what it keeps of a content.
    for marked in (f"{_MARK}{content}{_END}", f"{_MARK}{_END}"):
        changed = [*messages]
        changed[index] = {**changed[index], "content": marked}
        text = encoder.render_chat(changed, open_answer=True)
        if (text.count(_MARK), text.count(_END)) != (1, 1):
            continue
        before, after = text.split(_MARK)[0], text.split(_END)[1]
        stop = len(rendered) - len(after)
        if len(before) <= stop and rendered.startswith(before) and rendered.endswith(after):
            return Span(len(before), stop)
    # A template that tests the ends of a content leaves a mark in its middle.
    middle = len(content) // 2
    changed = [*messages]
    changed[index] = {**changed[index], "content": f"{content[:middle]}{_MARK}{content[middle:]}"}
    text = encoder.render_chat(changed, open_answer=True)
    start = text.find(_MARK) - middle
    written = content
    if not rendered.startswith(content, max(start, 0)):  # a template may trim it
        written = content.strip()
        start += content.find(written)
    is_there = start >= 0 and bool(written) and rendered.startswith(written, start)
    return Span(start, start + len(written)) if is_there and text.replace(_MARK, "", 1) == rendered else None


def rewritten_pieces(pieces: Sequence[str], split: int | None, written: str) -> list[str] | None:
    """Return the pieces of a content as the chat template wrote it, in which one of them differs.

    Args:
        split: The piece that the passages precede, which may not be next to what differs on both sides.

    Returns:
        None if it cannot be told which piece differs.
    """
    result, first, last = list(pieces), 0, len(pieces) - 1
    while first < last and written.startswith(result[first]):
        written = written.removeprefix(result[first])
        first += 1
    while first < last and written.endswith(result[last]):
        written = written.removesuffix(result[last])
        last -= 1
    if first < last and split is not None:
        return None
    result[first : last + 1] = [written, *[""] * (last - first)]
    return result


_TOOL, _ARGUMENTS, _RESULT = "probe_of_tools", "\ue000", "result_of_tools"
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a chat template writes a call: a JSON object with ``name`` and the arguments, between two texts.

    Attributes:
        arguments: Name of the field with the arguments: ``arguments`` (Qwen, Mistral) or ``parameters`` (Llama 3).
        opening: What the template writes between the beginning of the assistant's turn and the call.
        visible_opening: The part of it that answers show, without special tokens; may be empty.
        visible_closing: What answers show behind the call.
    """

    arguments: str
    opening: str
    visible_opening: str
    visible_closing: str

    def schema(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the JSON schema of a call of one of the tools, as text."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    self.arguments: tool["function"].get("parameters") or _NO_PARAMETERS,
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})

    def read(self, text: str, names: Collection[str]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Return the text of an answer without its calls, and the calls as (name, arguments).

        Malformed calls, and calls of other tools than ``names``, stay in the text.
        """
        calls: list[tuple[str, dict[str, Any]]] = []
        kept, position, decoder = "", 0, json.JSONDecoder()
        while (start := text.find("{", position)) >= 0:
            try:
                value, stop = decoder.raw_decode(text, start)
            except ValueError:
                value, stop = None, start + 1
            call = self._call(value, names)
            before = text[position : stop if call is None else start]
            if call is not None:
                before = before.rstrip().removesuffix(self.visible_opening).rstrip(" \n,")
                rest = text[stop:].lstrip()
                if self.visible_closing and rest.startswith(self.visible_closing):
                    stop = len(text) - len(rest) + len(self.visible_closing)
                calls.append(call)
            kept, position = kept + before, stop
        kept += text[position:]
        return (kept.strip() if calls else text), calls

    def _call(self, value: Any, names: Collection[str]) -> tuple[str, dict[str, Any]] | None:
        if not isinstance(value, dict) or value.get("name") not in names:
            return None
        arguments = value.get(self.arguments, {})
        return (value["name"], arguments) if isinstance(arguments, dict) else None


class ToolCallReader:
    """Reads calls from an answer while it is written; text is certain until a call may have begun.

    Args:
        names: The tools that may be called.
        inside: Whether the answer begins inside of a call.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, inside: bool) -> None:
        self._form, self._names = form, names
        self._mark = "" if inside else form.visible_opening or "{"
        self._waiting = ""

    def feed(self, text: str) -> str:
        """Add text; return the text that is certain."""
        self._waiting += text
        stop = self._waiting.find(self._mark)
        if stop < 0:
            lengths = range(min(len(self._mark), len(self._waiting)), 0, -1)
            stop = len(self._waiting) - next((n for n in lengths if self._mark.startswith(self._waiting[-n:])), 0)
        certain, self._waiting = self._waiting[:stop], self._waiting[stop:]
        return certain

    def finish(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Return the rest of the text, and the calls."""
        return self._form.read(self._waiting, self._names)


@dataclass(frozen=True, slots=True)
class BoundTools:
    """The tools of a question, for one generator.

    Attributes:
        encoder: The generator's tokenizer, which renders the tools.
        form: How its chat template writes calls.
        names: The tools that may be called.
        schema: The JSON schema of a call that must be made; None where the model decides.
    """

    encoder: TokenEncoder
    form: ToolFormat
    names: tuple[str, ...]
    schema: str | None

    def read(self, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Return the text of an answer without its calls, and the calls as (name, arguments)."""
        return self.form.read(text, self.names)

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self.form, self.names, inside=self.schema is not None)


def resolve_tools(generator: Generator, tools: Sequence[Mapping[str, Any]], choice: Any) -> BoundTools:
    """Return tools as a generator's chat template writes them.

    Args:
        tools: The tools in OpenAI's form.
        choice: ``auto`` or None, ``none``, ``any`` (``required``, True), the name of a tool, or OpenAI's object of it.

    Raises:
        ConfigError: no tool has the name.
        UnsupportedModelError: the chat template takes no tools, or a required call cannot be enforced.
    """
    encoder = generator.encoder
    if not encoder.takes_tools:
        raise UnsupportedModelError(
            f"{display_name(generator.model_id)} takes no tools here; give PosfixRAG.as_tool() to a model that does"
        )
    form = find_tool_format(encoder)
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name")
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice in (None, "auto", False):
        return BoundTools(encoder.with_tools(tools), form, names, None)
    if choice == "none":
        return BoundTools(encoder.with_tools(()), form, (), None)
    callable_names = names if choice in ("any", "required", True) else (choice,)
    required = [tool for tool in tools if tool["function"]["name"] in callable_names]
    if not required:
        raise ConfigError(f"tool_choice={choice!r} must be auto, none, any or the name of a tool: {', '.join(names)}")
    schema = form.schema(required)
    generator.check_json_schema(schema)
    return BoundTools(encoder.with_tools(tools, form.opening), form, callable_names, schema)


def find_tool_format(encoder: TokenEncoder) -> ToolFormat:
    """Return how the chat template of a model writes calls of tools.

    Raises:
        UnsupportedModelError: the template writes no tools, calls or results, or calls in another form.
    """
    tool = {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": _NO_PARAMETERS}}
    call = {"id": "call00000", "type": "function", "function": {"name": _TOOL, "arguments": _ARGUMENTS}}
    question: ChatMessage = {"role": "user", "content": "?"}
    called: ChatMessage = {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    result: ChatMessage = {"role": "tool", "content": _RESULT, "tool_call_id": "call00000", "name": _TOOL}
    try:
        opened = encoder.with_tools([tool]).render_chat([question])
        bare = encoder.with_tools(())
        written = bare.render_chat([question, called], open_answer=False)
        answered = bare.render_chat([question, called, result])
    except ConfigError as error:
        raise _unsupported("refuses them") from error
    if _TOOL not in opened or _TOOL not in written or _RESULT not in answered:
        raise _unsupported("writes no tools, no calls or no results")
    pairs = zip(bare.render_chat([question]), written, strict=False)
    turn = written[sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
    turn = re.sub(f'"?{_ARGUMENTS}"?', "{}", turn)
    for start in (match.start() for match in re.finditer("{", turn)):
        try:
            value, stop = json.JSONDecoder().raw_decode(turn, start)
        except ValueError:
            continue
        names = [name for name, field in value.items() if field == {}]
        if value.get("name") == _TOOL and len(names) == 1:
            opening = turn[:start]
            visible, closing = (
                encoder.decode_answer(encoder.encode_template(text)).strip() for text in (opening, turn[stop:])
            )
            return ToolFormat(names[0], opening, visible, closing)
    raise _unsupported("writes calls in another form than a JSON object with name and arguments")


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the chat template of the model takes no tools: it {reason}; choose a model whose template does (Qwen2.5, "
        "Llama 3.1, Mistral), or give PosfixRAG.as_tool() to a model that calls tools"
    )
