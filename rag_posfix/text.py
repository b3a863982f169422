"""Text that every later stage can encode: no lone surrogates, no NUL characters.

A lone surrogate cannot be encoded as UTF-8 and a NUL ends a string in many stores; both reach us from damaged
files and from clients. They become U+FFFD, once, at the door, so that hashes, token spans and JSON agree.
"""

from __future__ import annotations

import hashlib
import re

__all__ = ["clean_text", "content_hash", "titled_text"]

_UNENCODABLE = re.compile("[\ud800-\udfff\x00]")


def clean_text(text: str) -> str:
    """Return ``text`` with each lone surrogate and each NUL replaced by U+FFFD.

    Surrogate *pairs* that arrived as two code points (from JSON escapes) are joined first.
    """
    if _UNENCODABLE.search(text) is None:
        return text
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _UNENCODABLE.sub("\ufffd", joined)


def titled_text(title: object, text: str) -> str:
    """Return the text that stands for a document in an embedding: its title, if it has one, and its text."""
    return f"{title}\n{text}" if isinstance(title, str) and title.strip() else text


def content_hash(*parts: str) -> str:
    """Return a 128-bit hex digest of ``parts``; the boundaries between parts count."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = clean_text(part).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
