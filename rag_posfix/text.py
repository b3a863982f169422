"""Text that every later stage can encode: no lone surrogates, no NUL characters.

A lone surrogate cannot be encoded as UTF-8, and a NUL ends a string in many stores. Damaged files and clients can
contain both. They are replaced by U+FFFD once, at the input, so that hashes, token spans and JSON agree.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

from rag_posfix.errors import ConfigError

NO_PASSAGE_TEXT = "No passage was found that answers this question."
"""The default answer to a question without a passage."""

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, also for the first bytes of one that is cut."""

_CHARACTERS_PER_TOKEN = 2
_MOST_CHARACTERS_PER_TOKEN = 64
_ALWAYS_READ = 2**18
_MORE_TOKENS = 32
_SPLIT_CHARACTERS = 2**16

_SPACE = re.compile(r"\s")
_UNENCODABLE = re.compile("[\ud800-\udfff\x00]")


def clean_text(text: str) -> str:
    """Return ``text`` with each lone surrogate and each NUL replaced by U+FFFD.

    Surrogate *pairs* that arrived as two code points (from JSON escapes) are joined first.
    """
    if (text.isascii() and "\x00" not in text) or _UNENCODABLE.search(text) is None:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _UNENCODABLE.sub("\ufffd", joined)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return ``text`` with control characters that act on terminals as ``\uXXXX``; tabs and line breaks stay.

    These are C0 with ESC, DEL, C1, and the embeddings, overrides and isolates of bidirectional text. The result of
    JSON is JSON with the same values.
    """
    return _CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", text.replace("\r\n", "\n"))


def hide_passwords(text: str) -> str:
    """Return a text with ``...`` in place of the user and password of each URL.

    A password may hold slashes, so that ``...`` also takes the place of a port before a path with ``@``.
    """
    return re.sub(r"//(?:[^/:,]*:(?:(?!,\w+://).)*|[^/]*)@", "//...@", text, flags=re.DOTALL)


def single_spaced(text: str) -> str:
    """Return ``text`` with each run of white space as one space, and none around it. A long text is split in parts."""
    parts: list[str] = []
    start = 0
    while start < len(text):
        space = _SPACE.search(text, start + _SPLIT_CHARACTERS)
        end = len(text) if space is None else space.start()
        parts.append(" ".join(text[start:end].split()))
        start = end
    return " ".join(part for part in parts if part)


def text_beginning(text: str, tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return a beginning of a long text that has the same first ``tokens`` tokens.

    A tokenizer reads all characters, also those that it then cuts off. The beginning ends before a space and has 32
    tokens more, so that its last tokens, which the cut can change, are not needed. A short text is returned as it is.

    Limits: of a word or a run of spaces without end, 64 characters for each token are read, and at least 262,144.
    """
    needed = tokens + _MORE_TOKENS
    size, most = _CHARACTERS_PER_TOKEN * needed, max(_MOST_CHARACTERS_PER_TOKEN * needed, _ALWAYS_READ)
    while size < len(text):
        space = text.rfind(" ", size // 2, size)
        beginning = text[: size if space < 0 else space]
        if size >= most or count_tokens(beginning) >= needed:
            return beginning
        size = min(4 * size, most)
    return text


def clean_json(value: Any) -> Any:
    """Return a copy of ``value`` in which every string, at any depth, is cleaned by ``clean_text``.

    Dictionaries and lists are copied; other values are the same objects.
    """
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_json(key): clean_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_json(item) for item in value]
    return value


def parse_json(line: str) -> Any:
    """Return the value of one line of JSON, with its strings cleaned.

    The parser of the standard library reads lone surrogates, which are then replaced; stricter parsers reject the
    whole line.

    Raises:
        ValueError: the line is not JSON, or is nested too deeply.
    """
    try:
        return clean_json(json.loads(line, parse_constant=_reject_constant))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def checked_question(question: object) -> str:
    """Return ``question`` with clean text.

    Raises:
        ConfigError: it is no string, or has no visible character.
    """
    if not isinstance(question, str) or not clean_text(question).strip():
        raise ConfigError(f"the question is empty ({question!r}); pass a question with at least one visible character")
    return clean_text(question)


def titled_text(title: object, text: str) -> str:
    """Return the text of a document for embeddings: its title, if it has one, and its text."""
    return f"{title}\n{text}" if isinstance(title, str) and title.strip() else text


def content_hash(*texts: str) -> str:
    """Return a 128-bit hex digest of ``texts``; the boundaries between texts count."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = clean_text(text).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def allow_long_cells(text: str) -> None:
    """Let the csv module read any cell of a text: its limit, 131,072 characters in a process, is only raised."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))


WORDS_VERSION = 3
"""What ``split_words`` does, as the files of an index note it.

1: each Han or Kana character is a word. 2: words end at the vowel signs of Indic scripts, and at other marks.
"""

# Scripts without spaces between words, and Hangul, whose words end in particles: their words are pairs of characters.
_PAIRED = ("\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff", "\uac00-\ud7a3", "\u0e01-\u0e4e\u0e80-\u0ecd")
_LETTER = rf"[^\W_{''.join(_PAIRED)}]"
# Devanagari to Sinhala without their punctuation: the vowel signs, which are no letters for ``\w``, belong to a word.
_INDIC = "[\u0900-\u0963\u0966-\u096f\u0971-\u0df3]"
_WORD = re.compile("|".join(f"[{script}]+" for script in _PAIRED) + f"|{_LETTER}+(?:{_INDIC}+{_LETTER}*)*")
# Accents without a composed letter, Hebrew points, Arabic vowels and tatweel, the soft hyphen and joiners: the same
# word is written with and without them. A non-joiner separates parts of words in Persian.
_OPTIONAL = re.compile(
    "[\u00ad\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u200d\u2060]|(?<=[\u0900-\u0df3])\u200c"
)
_FIRST_PAIRED = re.compile(f"[{''.join(_PAIRED)}]")
# Thai and Lao: a consonant with its vowels and tone marks counts as one character.
_CHARACTER = re.compile("[\u0e40-\u0e44\u0ec0-\u0ec4]?.[\u0e30-\u0e3a\u0e45-\u0e4e\u0eb0-\u0ebd\u0ec8-\u0ecd]*")


def split_words(text: str) -> list[str]:
    """Return the words of ``text`` in order: runs of letters and digits, in lower case and Unicode's NFKC form.

    A run of Chinese, Japanese, Korean, Thai or Lao characters is split into overlapping pairs of characters, as
    Lucene's CJKAnalyzer does; a single character is a word. Arabic vowels, Hebrew points and soft hyphens are left
    out. No stemming and no stop words. For ASCII this is ``[a-z0-9]+`` of the lower-cased text.
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    runs = _WORD.findall(_OPTIONAL.sub("", unicodedata.normalize("NFKC", text).lower()))
    return [word for run in runs for word in (_pairs(run) if _FIRST_PAIRED.match(run) else (run,))]


def is_pair(word: str) -> bool:
    """Return whether a word of ``split_words`` is a pair of characters of a script without spaces, or one of them."""
    return _FIRST_PAIRED.match(word) is not None


def whole_words(phrase: str) -> str:
    """Return a pattern of a phrase that no word goes on around.

    Scripts whose words are pairs of characters for ``split_words`` have no ends of words: such a phrase may stand
    anywhere, and any phrase may stand next to their characters.
    """
    before = "" if is_pair(phrase[0]) else f"(?<!{_LETTER}|{_INDIC})"
    after = "" if is_pair(phrase[-1]) else f"(?!{_LETTER}|{_INDIC})"
    return before + re.escape(phrase) + after


def _pairs(run: str) -> list[str]:
    characters = _CHARACTER.findall(run)
    return [first + second for first, second in pairwise(characters)] or characters
