"""Compares answers with the accepted ones, as SQuAD and Lost in the Middle do."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_SPACES = re.compile(
    "[\u0e01-\u0ecd\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\uff10-\uff19\uff21-\uff3a\uff41-\uff5a\uff66-\uff9f]"  # full-width digits and letters, half-width Kana
)
_SURPLUS_SPACE = re.compile(f"(?<={_NO_SPACES.pattern}) | (?={_NO_SPACES.pattern})")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str, unspaced: bool | None = None) -> str:
    """Return ``text`` in lower case without punctuation, articles and surplus spaces, as SQuAD compares answers.

    A text of a script without spaces (Chinese, Japanese, Thai, ...) is compared in Unicode's NFKC form, without the
    punctuation of any script, and without the spaces next to characters of such a script.

    Args:
        unspaced: Whether the text is compared so; None for a text with characters of such a script.
    """
    unspaced = is_unspaced(text) if unspaced is None else unspaced
    if unspaced:
        text = unicodedata.normalize("NFKC", text)
        text = "".join(" " if unicodedata.category(character).startswith("P") else character for character in text)
    words = " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
    return _SURPLUS_SPACE.sub("", words) if unspaced else words


def is_unspaced(text: str) -> bool:
    """Return whether a text has characters of a script without spaces, or full-width ones as next to such a script."""
    return _NO_SPACES.search(text) is not None


def first_line(text: str) -> str:
    """Return the text before the first line break, as Lost in the Middle scores it."""
    return text.split("\n", 1)[0].strip()


def best_subspan_em(answer: str, accepted: Sequence[str]) -> float:
    """Return 1.0 if ``answer`` contains any accepted answer after normalisation, else 0.0.

    Source: Liu et al. (2024), Lost in the Middle, section 2.2, https://arxiv.org/abs/2307.03172. Their scripts cut the
    answer at the first line break before this; use ``first_line`` for that.
    Differs: an accepted answer, such as ``3.5``, is also compared as unspaced where the answer is in such a script.
    """
    return float(any(_holds(answer, candidate) for candidate in accepted))


def _holds(answer: str, accepted: str) -> bool:
    unspaced = is_unspaced(answer) or is_unspaced(accepted)
    text = normalize(answer, unspaced)
    # Its own form too: 1,000 is also 1000 next to Chinese characters.
    return any(form and form in text for form in (normalize(accepted), normalize(accepted, unspaced)))
