"""Whether an answer is right."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

__all__ = ["best_subspan_em", "first_line", "normalize"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return ``text`` in lower case without punctuation, articles and surplus spaces, as SQuAD compares answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """Return what stands before the first line break, as Lost in the Middle scores it."""
    return text.split("\n", 1)[0].strip()


def best_subspan_em(answer: str, accepted: Sequence[str]) -> float:
    """Return 1.0 if any accepted answer stands in ``answer`` once both are normalised, else 0.0.

    Source: Liu et al. (2024), Lost in the Middle, section 2.2, https://arxiv.org/abs/2307.03172. Their scripts cut the
    answer at the first line break before this; use ``first_line`` for that.
    """
    normalized = normalize(answer)
    return float(any((gold := normalize(candidate)) and gold in normalized for candidate in accepted))
