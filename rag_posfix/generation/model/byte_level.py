"""The alphabet of byte-level vocabularies: GPT-2's, in which every byte is one printable character."""

from __future__ import annotations

import json
from typing import Any


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of the alphabet.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on, in order. Source:
    Radford et al. (2019), https://github.com/openai/gpt-2, and the ``ByteLevel`` decoder of tokenizers.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def is_byte_level(backend: Any) -> bool:
    """Return whether a tokenizer's tokens are written in the alphabet: its decoder has a step ``ByteLevel``."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps = [decoder, *decoder.get("decoders", ())]
    return any(step.get("type") == "ByteLevel" for step in steps)
