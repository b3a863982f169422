"""The key of an entry: a hash of everything that keys and values of a passage depend on, and of nothing else."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from rag_posfix.errors import CacheError

if TYPE_CHECKING:
    import torch

SCHEMA_VERSION = 1
"""Part of every key. Increase it when stored entries or their meaning change: older entries are then misses."""

EncodingKey: TypeAlias = str | int | float | bool | tuple["EncodingKey", ...] | None
"""What a plan changes in the encoding of a passage, as plain data."""


def passage_key(
    model_fingerprint: str,
    dtype: torch.dtype,
    encoding: EncodingKey,
    prefix_tokens: Sequence[int],
    tokens: Sequence[int],
    salt: str,
) -> str:
    """Return the key of a passage as 64 hexadecimal digits. Two keys are equal only if all arguments are.

    The hash has 256 bits, so that two passages with the same key cannot be constructed: questions about one passage
    would be answered from the other.

    Args:
        dtype: Type of the keys and values.
        encoding: What the plan changes in the encoding: first position, base of the rotation, scale per layer, ... 1
            and 1.0 are different.
        prefix_tokens: Tokens before the passage that it attends to.
        salt: Separates the entries of tenants.

    Raises:
        CacheError: ``encoding`` contains something other than plain data, or a token is no 64-bit integer.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_encoded(("passage", SCHEMA_VERSION, model_fingerprint, str(dtype), encoding, salt)))
    digest.update(_tokens(prefix_tokens))
    digest.update(_tokens(tokens))
    return digest.hexdigest()


def _encoded(encoding: EncodingKey) -> bytes:
    """Return an unambiguous encoding of a key: a letter for the type, the length, the content."""
    match encoding:
        case None:
            letter, content = b"n", b""
        case bool():
            letter, content = b"b", str(encoding).encode()
        case str():
            letter, content = b"s", encoding.encode("utf-8", "surrogatepass")
        case int():
            letter, content = b"i", str(encoding).encode()
        case float():
            letter, content = b"f", struct.pack(">d", encoding + 0.0)  # -0.0 is 0.0
        case tuple():
            letter, content = b"t", b"".join(map(_encoded, encoding))
        case _:
            raise CacheError(
                f"passage key: a part of type {type(encoding).__name__} is not understood; allowed: str, int, float, "
                "bool, None and tuples of them"
            )
    return letter + len(content).to_bytes(8, "big") + content


def _tokens(tokens: Sequence[int]) -> bytes:
    try:
        numbers = array("q", tokens)
    except (OverflowError, TypeError) as error:
        raise CacheError(f"passage key: tokens must be 64-bit integers ({error})") from error
    if sys.byteorder == "big":  # machines that share a store must compute the same keys
        numbers.byteswap()
    return len(numbers).to_bytes(8, "big") + numbers.tobytes()
