"""The prompt template, and chat messages in a form that every chat template accepts. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.errors import ConfigError
from rag_posfix.text import clean_text, content_hash

BLANK_LINE = "\n\n"

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text of a prompt, apart from question and passages.

    The user's turn is: instruction, blank line, passages, question prefix, question, answer cue. Passages have no
    numbers, because a number would reveal the position. Without passages the turn is the question alone.

    Attributes:
        instruction: Text before the passages; may be empty.
        heading: Text before a passage that has a title; ``{title}`` is replaced. May be empty.
        separator: Text after every passage.
        question_prefix: Text before the question.
        answer_cue: Text after the question.
        system: A system message before all others; none if empty.
    """

    instruction: str = (
        "Answer the question using only the passages below. Some of them may be irrelevant. Give a short answer."
    )
    heading: str = "{title}\n"
    separator: str = BLANK_LINE
    question_prefix: str = "Question: "
    answer_cue: str = "\nAnswer:"
    system: str = ""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"prompt template: {name} is {type(value).__name__}, must be a string")
        if self.heading and "{title}" not in self.heading:
            raise ConfigError(
                f"prompt template: heading={self.heading!r} must contain '{{title}}'; leave it empty for no headings"
            )

    @property
    def opening(self) -> str:
        """The text before the first passage in the user's turn."""
        return self.instruction + BLANK_LINE if self.instruction else ""

    def heading_for(self, title: str) -> str:
        """Return the heading of a passage; empty without a title."""
        return self.heading.replace("{title}", title) if title else ""

    def fingerprint(self) -> str:
        """Return a hash of all fields; part of every cache key."""
        return content_hash("prompt-template", *astuple(self))


def merge_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages with at most one system message, at the start, and no role twice in a row.

    Many chat templates raise on anything else. Merged contents are joined by a blank line; all are cleaned.

    Raises:
        ConfigError: a role is unknown, or a content is no string.
    """
    system: list[str] = []
    turns: list[tuple[str, list[str]]] = []
    for index, message in enumerate(messages):
        role, content = _check_message(message, index)
        if role == "system":
            system.append(content)
        elif turns and turns[-1][0] == role:
            turns[-1][1].append(content)
        else:
            turns.append((role, [content]))
    if system:
        turns.insert(0, ("system", system))
    return tuple({"role": role, "content": BLANK_LINE.join(contents)} for role, contents in turns)


def _check_message(message: ChatMessage, index: int) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ConfigError(f"message {index}: role {role!r} is not supported; use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise ConfigError(f"message {index} ({role}): content is {kind}, must be a string; join its text parts")
    return role, clean_text(content)
