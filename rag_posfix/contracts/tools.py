"""Tools of a question: their definitions, which of them may be called, and the calls of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rag_posfix.checked import check_type, checked_list
from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.errors import ConfigError
from rag_posfix.parameters import shown

MAX_TOOLS = 128
"""Tools of one question, as OpenAI's API allows."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. Mistral's chat template needs an ``id`` of nine letters and digits."""

    id: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a question may call, and the turns of tools that follow it.

    Attributes:
        definitions: ``{"type": "function", "function": {"name", "description", "parameters"}}``, ``parameters`` as a
            JSON schema of an object. May be empty where the conversation alone has calls.
        choice: ``auto`` (the model decides), ``none``, ``required`` (any of them must be called), or the name of the
            tool that must be called. A call that must be made follows the schema of its tool, and needs no passage.
        turns: Messages behind the question: calls and their results.
        parallel: Whether an answer may have several calls; otherwise the first one counts.

    Raises:
        ConfigError: a tool is malformed, two have the same name, or none has the name in ``choice``.
    """

    definitions: Sequence[Mapping[str, Any]] = ()
    choice: str = "auto"
    turns: Sequence[ChatMessage] = ()
    parallel: bool = True

    def __post_init__(self) -> None:
        tools = tuple(checked_list("tools", self.definitions, Mapping, '{"type": "function", "function": {...}}'))
        names = [_checked_name(tool) for tool in tools]
        if len(set(names)) < len(names) or len(names) > MAX_TOOLS:
            raise ConfigError(
                f"tools has {len(names)} tools of {len(set(names))} names; give up to {MAX_TOOLS} different ones"
            )
        check_type("tool_choice", self.choice, str, "auto, none, required, or the name of a tool")
        if self.choice not in (*names, "auto", "none") and (self.choice != "required" or not names):
            raise ConfigError(
                f"tool_choice={shown(self.choice)} must be auto, none, required or the name of a tool of the request: "
                f"{', '.join(names) or 'it has none'}"
            )
        object.__setattr__(self, "definitions", tools)
        object.__setattr__(self, "turns", tuple(checked_list("turns", self.turns, Mapping, "messages")))

    @property
    def text(self) -> str:
        """All of it as text, different for different tools, choices and turns."""
        return json.dumps([self.definitions, self.choice, self.turns, self.parallel])


def _checked_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"tool {shown(name)} needs a name of 1 to 128 letters, digits, '_', '-' and '.'")
    parameters = function.get("parameters")
    if parameters is not None and not (
        isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
    ):
        raise ConfigError(f"the parameters of the tool {name} must be a JSON schema of type object, or left out")
    return name
