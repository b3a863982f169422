"""Prompts in which one passage is replaced by a dummy: as long as the passage, and about nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import cycle, islice

from rag_posfix.plan.layout import Layout

FILLER_TOKENS = 16


def filler(layout: Layout) -> tuple[int, ...]:
    """Return the tokens that stand in the most passages, up to 16: words that tell no passage from another.

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
