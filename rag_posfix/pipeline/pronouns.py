"""Names in place of pronouns in a follow-up, for models that read each passage alone and lose who is spoken of.

English only; other languages are left as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rag_posfix.contracts.generator import ChatMessage
from rag_posfix.pipeline.language import language_of

_NO_NAME = (
    r"(?!I['\u2019]|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:January|February|March|April|May|June|July|August|"
    r"September|October|November|December|English|German|French|Spanish)\b)"
)
_NAME = re.compile(
    rf"(?<![.!?:] )(?<!^)\b(?:[Tt]he (?:[a-z]+ ){{0,2}})?{_NO_NAME}[A-Z][\w'\u2019-]+"
    r"(?: (?:(?:of|de|von|van|the) )?[A-Z0-9][\w'\u2019-]*)*"
)
_POSSESSIVE = re.compile(
    r"\b(?:his|its|their|her(?= (?!(?:in|on|at|to|from|by|with|when|after|before|and|or|as|for|out)\b)[a-z]))\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(
    r"\b(?:he|she|him|her|they|them|"
    r"it(?! (?:is |was )?(?:takes?|true|possible|allowed|necessary|rains?|that|about)\b))\b",
    re.IGNORECASE,
)


def with_names(question: str, history: Sequence[ChatMessage]) -> str:
    """Return a question whose first pronoun is the name that the user's last messages speak of.

    The question itself if it names somebody, has no pronoun of the third person, or no message has a name.
    """
    if not history or language_of(question) not in ("en", None) or _NAME.search(question):
        return question
    match, suffix = _POSSESSIVE.search(question), "'s"
    if match is None:
        match, suffix = _PRONOUN.search(question), ""
    if match is None:
        return question
    asked = [str(message.get("content")) for message in history if message.get("role") == "user"]
    names = (found.group() for text in reversed(asked[-3:]) if (found := _NAME.search(text)))
    name = next(names, "")
    return question[: match.start()] + name + suffix + question[match.end() :] if name else question
