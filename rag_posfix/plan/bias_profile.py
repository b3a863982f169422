"""Bias profiles: how a model favours positions of a prompt, measured once, and the dummy passages that measure it.

A slot profile holds one number for each slot of a prompt: the attention that a dummy passage got there. A channel
profile names the hidden channel that follows the position. A head list names the attention heads that find passages.
The probes write them as JSON files; methods take values. Slot profiles and head lists of the packaged models are
shipped: where a method takes the path of a file, ``smollm2`` or ``gemma3-270m`` names the file of that model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from rag_posfix.errors import ConfigError
from rag_posfix.parameters import NumberList
from rag_posfix.plan.layout import Layout

FILE_BYTES = 1 << 20
"""A profile's file is read up to this size."""

BIAS_PROFILE = NumberList(0, 1e6, min_length=2, max_length=1000, nonzero=True)
"""What a slot profile may hold: attention in any unit."""

PACKAGED = Path(__file__).parent / "profiles"
"""Shipped profiles, written by ``python -m benchmarks.packaged_profiles``."""

FileReader = Callable[[str], Mapping[str, Any]]
"""Path of a file -> values of parameters."""


def bias_profile_from(parameter: str) -> FileReader:
    """Return what reads a slot profile from a file into ``parameter``.

    The file is a record of ``rag-posfix probe slot-attention``, a JSON object with the list ``profile``, or the list
    alone. The numbers are checked by the method that takes them.
    """
    return partial(_slot_profile, parameter)


def _slot_profile(parameter: str, path: str) -> Mapping[str, Any]:
    data = _read_json(path, 'a JSON object {"profile": [...]}, as rag-posfix probe slot-attention writes it')
    profile = data.get("profile") if isinstance(data, dict) else data
    if not isinstance(profile, list):
        raise ConfigError(f"{path!r} holds no profile; give a record of rag-posfix probe slot-attention")
    return {parameter: tuple(profile)}


def read_channel_profile(path: str) -> Mapping[str, Any]:
    """Return channel, factor and layers from a channel profile.

    Raises:
        ConfigError: the file is no channel profile of ``rag-posfix probe positional-dimensions``.
    """
    expected = 'a JSON object {"channel": 3, "factor": 0.0, "layers": [first, last]}'
    data = _read_json(path, f"{expected}, as rag-posfix probe positional-dimensions writes it")
    try:
        first, last = data["layers"]
        return {"channel": data["channel"], "factor": data["factor"], "first_layer": first, "last_layer": last}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path!r} is no channel profile; it must hold {expected}") from error


def read_head_list(path: str) -> Mapping[str, Any]:
    """Return the heads from a record of ``rag-posfix probe retrieval-heads``, or from a list [[layer, head], ...].

    Raises:
        ConfigError: the file holds no list of heads.
    """
    data = _read_json(
        path, 'a JSON object {"heads": [[layer, head], ...]}, as rag-posfix probe retrieval-heads writes it'
    )
    heads = data.get("heads") if isinstance(data, dict) else data
    if not isinstance(heads, list):
        raise ConfigError(f"{path!r} holds no heads; give a record of rag-posfix probe retrieval-heads")
    return {"heads": heads}


def packaged_profiles() -> tuple[str, ...]:
    """Return the names of the models whose profiles are shipped."""
    return tuple(sorted(path.stem for path in PACKAGED.glob("*.json")))


def _read_json(path: str, expected: str) -> Any:
    """Return the JSON of a regular file; reject devices and pipes, and read at most ``FILE_BYTES``.

    The name of a packaged model is its shipped profile, unless a file has that name.
    """
    if path in packaged_profiles() and not os.path.exists(path):
        path = str(PACKAGED / f"{path}.json")
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path!r} is not a regular file; give the path of {expected}")
            if status.st_size > FILE_BYTES:
                raise ConfigError(f"{path!r} has more than {FILE_BYTES} bytes; give the path of {expected}")
            return json.loads(file.read(FILE_BYTES + 1))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ConfigError(f"{path!r} cannot be read ({reason}); give the path of {expected}") from error


def stretched(profile: Sequence[float], count: int) -> tuple[float, ...]:
    """Return a slot profile for ``count`` slots: linear between the measured ones, the ends stay the ends.

    Formula: slot j of m takes the profile's value at place j (n - 1) / (m - 1).
    """
    if count == len(profile) or count < 2:
        return tuple(profile[:count])
    values = []
    pairs = list(pairwise(profile))
    for slot in range(count):
        # In whole numbers, so that slots that mirror each other get the same value.
        left, remainder = divmod(slot * len(pairs), count - 1)
        low, high = pairs[left] if left < len(pairs) else (profile[-1], profile[-1])
        values.append((low * (count - 1 - remainder) + high * remainder) / (count - 1))
    return tuple(values)


def scaled(profile: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """Return a slot profile for the slots of a prompt, stretched to their number and scaled to their mean attention.

    Formula: b_k = b'_k mean(measured) / mean(b'), b' the stretched profile.

    Args:
        profile: Two numbers or more, none negative, not all 0.
        measured: The attention in each slot of the prompt.
    """
    largest = max(profile)  # divided by it, numbers near the smallest of floats keep their digits
    resized = stretched([value / largest for value in profile], len(measured))
    total = math.fsum(resized)
    return tuple(value * math.fsum(measured) / total for value in resized) if total > 0 else resized


FILLER_TOKENS = 16


def filler(layout: Layout) -> tuple[int, ...]:
    """Return the tokens that are in the most passages, up to 16: words that distinguish no passages.

    Of tokens in equally many passages, the more frequent comes first, then the smaller id. The order of the passages
    makes no difference.
    """
    texts = [layout.tokens(text) for text in layout.texts]
    passages = Counter(token for text in texts for token in set(text))
    count = Counter(token for text in texts for token in text)
    return tuple(sorted(passages, key=lambda token: (-passages[token], -count[token], token))[:FILLER_TOKENS])


def with_dummy(layout: Layout, slot: int) -> Layout:
    """Return the same prompt with passage ``slot`` replaced by a dummy of as many tokens.

    Heading and text are replaced by the filler tokens over and over; the separator after them stays, so that all
    spans stay where they are.
    """
    words = filler(layout)
    replaced = slice(layout.passages[slot].start, layout.texts[slot].stop if words else layout.passages[slot].start)
    ids = list(layout.token_ids)
    ids[replaced] = islice(cycle(words), replaced.stop - replaced.start)
    keys = tuple("dummy" if index == slot else key for index, key in enumerate(layout.keys))
    return dataclasses.replace(layout, token_ids=tuple(ids), keys=keys)
