"""Whether the text of an answer is well formed: faults that a reader sees without the passages."""

from __future__ import annotations

import json
import re
from typing import Literal

FormFault = Literal["empty", "repetition", "fragment", "endless"]

WORDS = re.compile(r"\w+")
LONGEST_RUN = 100
"""Words of the longest run whose repetition is looked for."""
ENDLESS_WORDS = 60
"""A first sentence of more words than this does not end."""

_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[\u3002\uff01\uff1f\n]")
_UNFINISHED = re.compile(r"(?:[:,;]|\b(?:the|a|an|of|is|are|was|were|and|or|to|in|by|with))\s*$", re.IGNORECASE)
# "1/2", "1." and "2)": the number of a page or of a list's item, without the item.
_BARE_MARKER = re.compile(r"\s*(?:\d+\s*/\s*\d+|\(?\d+[.)])\s*$")


def repeats(text: str) -> bool:
    """Return whether a run of words occurs in succession: a word three times, or 2 to 100 words twice.

    Cost: at most ``LONGEST_RUN`` comparisons for each word.
    """
    words = WORDS.findall(text.lower())
    for length in range(1, min(LONGEST_RUN, len(words) // 2) + 1):
        wanted = 2 if length == 1 else length  # equal pairs in succession, each ``length`` words apart
        equal = 0
        for word, later in zip(words, words[length:], strict=False):
            equal = equal + 1 if word == later else 0
            if equal == wanted:
                return True
    return False


def _is_json(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def find_form_fault(text: str, is_cut: bool = False) -> FormFault | None:
    """Return what is wrong with the form of an answer, the first of these, or None; a JSON object has no fault.

    - ``empty``: no letter and no digit.
    - ``repetition``: ``repeats``.
    - ``fragment``: a bare list or page number ("1/2", "1."), or an end without the word that must follow ("The answer
      is:", "It is in the"). An answer that ``max_tokens`` cut (``is_cut``) may end anywhere.
    - ``endless``: the first sentence has more than ``ENDLESS_WORDS`` words.
    """
    if _is_json(text):
        return None
    if not WORDS.search(text):
        return "empty"
    if repeats(text):
        return "repetition"
    if _BARE_MARKER.match(text) or (not is_cut and _UNFINISHED.search(text)):
        return "fragment"
    end = _SENTENCE_END.search(text.lstrip())
    first = text.lstrip()[: end.start() if end else None]
    return "endless" if len(WORDS.findall(first)) > ENDLESS_WORDS else None
