"""Decontamination: what shares a sequence of words with evaluation data is not trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.training.data.pair import Pair, Segment

_WORD = re.compile(r"\w+")


class Contamination:
    """The sequences of n words of evaluation questions and their gold passages.

    A text with fewer words than n counts as one sequence, so that short questions are found by equality.

    Source: An et al. (2024), IN2/FILM, section 3.2, 10-gram decontamination, https://arxiv.org/abs/2404.16811
    """

    def __init__(self, examples: Iterable[PositionExample] = (), n: int = 10) -> None:
        self._n = n
        texts = (text for one in examples for text in (one.question, *(gold.page_content for gold in one.gold)))
        self._known = {gram for text in texts for gram in self._grams(text)}

    def __len__(self) -> int:
        return len(self._known)

    def in_pair(self, pair: Pair) -> bool:
        """Return whether the question or a segment of a pair is known."""
        return self._has(pair.question) or any(map(self.in_segment, pair.segments))

    def in_segment(self, segment: Segment) -> bool:
        """Return whether a segment shares a sequence of n words with evaluation data."""
        return self._has(segment.text)

    def _has(self, text: str) -> bool:
        return bool(self._known) and any(gram in self._known for gram in self._grams(text))

    def _grams(self, text: str) -> Iterator[tuple[str, ...]]:
        words: Sequence[str] = _WORD.findall(text.lower())
        if not words:
            return
        for start in range(max(1, len(words) - self._n + 1)):
            yield tuple(words[start : start + self._n])
