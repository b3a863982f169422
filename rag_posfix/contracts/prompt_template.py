"""The text of a prompt, as data."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import lru_cache

from rag_posfix.errors import ConfigError
from rag_posfix.text import content_hash

BLANK_LINE = "\n\n"


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
        history_first: Whether the passages are in the user's last turn, after system message and history of the
            caller, so that they are encoded anew in every turn and for every user. By default they are in the first
            turn, after constant text only.
        no_passage: The answer, in the language of the template, to a question without a passage, where the settings
            have the default text. It is no part of the prompt.
    """

    instruction: str = (
        "Answer the question using only the passages below. Some of them may be irrelevant. Give a short answer."
    )
    heading: str = "{title}\n"
    separator: str = BLANK_LINE
    question_prefix: str = "Question: "
    answer_cue: str = "\nAnswer:"
    system: str = ""
    history_first: bool = False
    no_passage: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, is_text = getattr(self, field.name), isinstance(field.default, str)
            if not isinstance(value, str if is_text else bool):
                kind = "a string" if is_text else "true or false"
                raise ConfigError(f"prompt template: {field.name} is {type(value).__name__}, must be {kind}")
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
        """Return a hash of the fields that the prompt depends on; part of every cache key."""
        return _fingerprint(self)


@lru_cache(maxsize=64)
def _fingerprint(template: PromptTemplate) -> str:
    *texts, history_first, _ = astuple(template)
    return content_hash("prompt-template", *texts, *(["history-first"] if history_first else []))
