"""Tools as a chat template writes them: found by rendering a call; calls are read from what the model writes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.contracts.generator import ChatMessage, Generator, ToolEncoder, check_json_schema, shown_model
from rag_posfix.errors import ConfigError, UnsupportedModelError

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

    encoder: ToolEncoder
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
    if not isinstance(encoder, ToolEncoder):
        raise UnsupportedModelError(
            f"{shown_model(generator.model_id)} takes no tools here; give PosfixRAG.as_tool() to a model that does"
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
    check_json_schema(generator, schema)
    return BoundTools(encoder.with_tools(tools, form.opening), form, callable_names, schema)


def find_tool_format(encoder: ToolEncoder) -> ToolFormat:
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
