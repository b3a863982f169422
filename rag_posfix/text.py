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
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from rag_posfix.errors import ConfigError

NO_PASSAGE_TEXT = "No passage was found that answers this question."
"""The default answer to a question without a passage."""

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, also for the first bytes of one that is cut."""

_CHARACTERS_PER_TOKEN = 2
_MAX_CHARACTERS_PER_TOKEN = 64
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
    size, most = _CHARACTERS_PER_TOKEN * needed, max(_MAX_CHARACTERS_PER_TOKEN * needed, _ALWAYS_READ)
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


def parse_json(line: str, *, lenient: bool = False) -> Any:
    """Return the value of one line of JSON, with its strings cleaned; ``lenient`` reads NaN and Infinity as null.

    The parser of the standard library reads lone surrogates, which are then replaced; stricter parsers reject the
    whole line.

    Raises:
        ValueError: the line is not JSON, or is nested too deeply.
    """
    try:
        return clean_json(json.loads(line, parse_constant=(lambda _: None) if lenient else _reject_constant))
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


WORDS_VERSION = 4
"""What ``split_words`` does, as the files of an index note it.

1: each Han or Kana character is a word. 2: words end at the vowel signs of Indic scripts, and at other marks.
3: accents count, and a part number is found only as it is written.
"""

# Scripts without spaces between words, and Hangul, whose words end in particles: their words are pairs of characters.
_PAIRED = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff", "\uac00-\ud7a3", "\u0e01-\u0e4e\u0e80-\u0ecd",
    "\u1000-\u103f\u1050-\u108f\u109a-\u109d\uaa60-\uaa7f", "\u1780-\u17d3\u17d7\u17dc\u17dd",
)  # fmt: skip
_LETTER = rf"[^\W_{''.join(_PAIRED)}]"
# Signs that are no letters for ``\w`` and belong to a word: Syriac to Mandaic, Devanagari to Sinhala without their
# punctuation, Tibetan, scripts of the Philippines, Bali and Java.
_SIGN = (
    "[\u0711\u0730-\u074a\u07a6-\u07b0\u07eb-\u07f3\u0816-\u082d\u0859-\u085b\u0900-\u0963\u0966-\u096f\u0971-\u0df3"
    "\u0f18\u0f19\u0f35\u0f37\u0f39\u0f71-\u0f84\u0f8d-\u0fbc\u1712-\u1734\u1752-\u1773\u1b00-\u1bad\ua980-\ua9c0]"
)
_PLAIN = f"{_LETTER}+(?:{_SIGN}+{_LETTER}*)*"
_JOINT = "[-_/^]"
_LANGUAGE = r"[a-z](?:\+\+|#(?![^\W\d_]))"  # C++, F#
_WORD = re.compile(
    "|".join([_LANGUAGE, f"{_PLAIN}(?:{_JOINT}(?!{_LANGUAGE}){_PLAIN})*", *(f"[{script}]+" for script in _PAIRED)])
)
_ASCII_WORD = re.compile(rf"{_LANGUAGE}|[a-z0-9]+(?:[-/_^](?!{_LANGUAGE})[a-z0-9]+)*")  # the same, faster
_FOREIGN = re.compile(rf"[^\W\x00-\x7f]|{_SIGN}")
_JOINTS = re.compile(_JOINT)
_MAX_JOINED_PARTS, _MAX_JOINED_CHARACTERS = 4, 32
_MIN_LONG_NUMBER = 7
_RAISED = "\u00b9\u00b2\u00b3\u2070\u2074-\u2079\u00bc-\u00be\u2150-\u215e"
_BEFORE_RAISED = re.compile(rf"[{_RAISED}](?<=[^\W{_RAISED}].)")
# Accents, but those of Cyrillic letters of their own; Hebrew points, Arabic vowels and tatweel, the soft hyphen and
# joiners: the same word is written with and without them. A non-joiner separates parts of words in Persian.
_OPTIONAL = re.compile(
    "[\u0300-\u036f](?<![иу]\u0306)(?<![гк]\u0301)(?<!і\u0308)|"  # noqa: RUF001 - Cyrillic letters
    "[\u00ad\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u200d\u2060]|\u200c(?<=[\u0900-\u0df3]\u200c)"
)
_BASE_LETTERS = str.maketrans(
    {"æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "ł": "l", "ħ": "h", "ı": "i", "♯": "#"}  # noqa: RUF001
    | dict.fromkeys("\u2010\u2011\u2012\u2013", "-") | dict.fromkeys("\u2018\u2019\u201c\u201d", "'")
)  # fmt: skip
_BASE = re.compile(f"[{''.join(map(chr, _BASE_LETTERS))}]")
_FIRST_PAIRED = re.compile(f"[{''.join(_PAIRED)}]")
# A consonant with its vowels and tone marks counts as one character, in Burmese and Khmer with those stacked below it.
_CHARACTER = re.compile(
    "[\u0e40-\u0e44\u0ec0-\u0ec4]?.(?:[\u1039\u17d2].|[\u0e30-\u0e3a\u0e45-\u0e4e\u0eb0-\u0ebd\u0ec8-\u0ecd"
    "\u102b-\u103e\u1056-\u1059\u105e-\u1060\u1062-\u1064\u1067-\u106d\u1071-\u1074\u1082-\u108d\u108f\u109a-\u109d"
    "\u17b4-\u17d3\u17dd])*"
)


def split_words(text: str) -> list[str]:
    """Return the words of ``text`` in order: runs of letters and digits without accents, by Unicode's case folding.

    A part number, which has letters and digits between hyphens or slashes, is its parts and what they are together:
    ``AX-900/B`` is found as ``AX900B``, and as ``AX-900``. ``C++`` and ``C#`` are words. A number that is raised is
    one of its own. A run of Chinese, Japanese, Korean, Thai, Lao, Burmese or Khmer characters is split into
    overlapping pairs of characters, as Lucene's CJKAnalyzer does; a single character is a word. Arabic vowels, Hebrew
    points and soft hyphens are left out. No stemming and no stop words.
    """
    is_foreign = False
    if text.isascii():
        folded = text.lower()
    else:
        folded = unicodedata.normalize("NFKD", _BEFORE_RAISED.sub(r"^\g<0>", text)).casefold()
        folded = _BASE.sub(lambda letter: _BASE_LETTERS[ord(letter.group())], _OPTIONAL.sub("", folded))
        if is_foreign := _FOREIGN.search(folded) is not None:
            folded = unicodedata.normalize("NFC", folded)
    words: list[str] = []
    for run in (_WORD if is_foreign else _ASCII_WORD).findall(folded):
        if run.isascii() and run.isalnum():
            words.append(run)
        else:
            words += _words_of(run)
    return words


def _words_of(run: str) -> Sequence[str]:
    if _FIRST_PAIRED.match(run):
        characters = _CHARACTER.findall(run)
        return [first + second for first, second in pairwise(characters)] or characters
    parts = _JOINTS.split(run)
    count = len(parts)
    if count == 1 or len(run) > _MAX_JOINED_CHARACTERS or not any(map(str.isdigit, run)):
        return parts
    lengths = range(2 if count <= _MAX_JOINED_PARTS else count, count + 1)
    joined = ("".join(parts[first : first + length]) for length in lengths for first in range(count - length + 1))
    return [*parts, *(word for word in joined if not word.isdecimal() or len(word) >= _MIN_LONG_NUMBER)]


def is_pair(word: str) -> bool:
    """Return whether a word of ``split_words`` is a pair of characters of a script without spaces, or one of them."""
    return _FIRST_PAIRED.match(word) is not None


def whole_words(phrase: str) -> str:
    """Return a pattern of a phrase that no word goes on around.

    Scripts whose words are pairs of characters for ``split_words`` have no ends of words: such a phrase may stand
    anywhere, and any phrase may stand next to their characters.
    """
    before = "" if is_pair(phrase[0]) else f"(?<!{_LETTER}|{_SIGN})"
    after = "" if is_pair(phrase[-1]) else f"(?!{_LETTER}|{_SIGN})"
    return before + re.escape(phrase) + after
