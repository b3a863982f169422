"""Text that every later stage can encode: no lone surrogates, no NUL characters.

A lone surrogate cannot be encoded as UTF-8, and a NUL ends a string in many stores. Damaged files and clients can
contain both. They are replaced by U+FFFD once, at the input, so that hashes, token spans and JSON agree.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NoReturn

from rag_posfix.errors import ConfigError

_UNENCODABLE = re.compile("[\ud800-\udfff\x00]")


def clean_text(text: str) -> str:
    """Return ``text`` with each lone surrogate and each NUL replaced by U+FFFD.

    Surrogate *pairs* that arrived as two code points (from JSON escapes) are joined first.
    """
    if _UNENCODABLE.search(text) is None:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _UNENCODABLE.sub("\ufffd", joined)


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
