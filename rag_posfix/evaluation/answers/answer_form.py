"""The form of an answer: whether it is a well-formed short answer, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_WORDS = 30
"""A short answer has at most this many words in its first line."""

_WORDS = re.compile(r"\w+")


def repeats(text: str) -> bool:
    """Return whether a run of words stands twice in succession: a word three times, or two words or more twice."""
    words = _WORDS.findall(text.lower())
    for length in range(1, len(words) // 2 + 1):
        times = 3 if length == 1 else 2
        for start in range(len(words) - times * length + 1):
            run = words[start : start + length]
            if words[start : start + times * length] == run * times:
                return True
    return False


def is_sound(answer: str) -> bool:
    """Return whether an answer is well formed: its first line has 1 to 30 words, and no run of words is repeated."""
    first = answer.split("\n", 1)[0]
    return 1 <= len(_WORDS.findall(first)) <= MAX_WORDS and not repeats(answer)


def summarize_form(answers: Sequence[str]) -> dict[str, float]:
    """Return shares: ``sound`` answers, those that ``repeat``, and the mean number of ``words``."""
    count = max(len(answers), 1)
    return {
        "sound": sum(map(is_sound, answers)) / count,
        "repeats": sum(map(repeats, answers)) / count,
        "words": sum(len(_WORDS.findall(answer)) for answer in answers) / count,
    }
