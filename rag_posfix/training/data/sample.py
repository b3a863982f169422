"""A training sample: a question, and its segments at drawn places among others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import question_and_answers, visible
from rag_posfix.training.data.contamination import Contamination
from rag_posfix.training.data.pair import Pair, PairSource, Segment, drawn
from rag_posfix.training.data.settings import DataSettings

MOST_DRAWS = 200
"""Draws of a pair, or of a segment around it, in a row that may be refused."""
SEGMENTS_OF_MULTI = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A question, its answers, and passages of which some are gold.

    Attributes:
        id: Its number in the file.
        question: The question.
        answers: Accepted answers; the first is trained on.
        passages: All passages, in the order of the prompt.
        gold: The places of those that the answer depends on, ascending.
        source: What made the pair.
        tokens: Tokens of the passages' texts together.
        length_bin: The part of the range of lengths that it was drawn for.
        rejected: Draws before it that were refused.
    """

    id: int
    question: str
    answers: tuple[str, ...]
    passages: tuple[Segment, ...]
    gold: tuple[int, ...]
    source: str = ""
    tokens: int = 0
    length_bin: int = 0
    rejected: int = 0

    def row(self) -> dict[str, Any]:
        """Return the sample as a row in the format of Lost in the Middle, with further fields."""
        return {
            "question": self.question,
            "answers": list(self.answers),
            "ctxs": [
                {"title": one.title, "text": one.text, "isgold": place in self.gold}
                for place, one in enumerate(self.passages)
            ],
            "id": self.id,
            "source": self.source,
            "tokens": self.tokens,
            "length_bin": self.length_bin,
            "rejected": self.rejected,
        }

    def documents(self) -> list[Document]:
        """Return the passages as documents, in the order of the prompt."""
        return [
            Document(page_content=one.text, metadata={"title": one.title}, id=f"{self.id}-{place}")
            for place, one in enumerate(self.passages)
        ]

    def moved(self, place: int) -> Sample:
        """Return the sample with its gold passages together, in their order, the first of them at ``place``."""
        last = len(self.passages) - len(self.gold)
        if not 0 <= place <= last:
            raise ConfigError(f"sample {self.id}: place {place} of its gold passages must be between 0 and {last}")
        others = [one for at, one in enumerate(self.passages) if at not in self.gold]
        gold = [self.passages[at] for at in self.gold]
        passages = (*others[:place], *gold, *others[place:])
        return replace(self, passages=passages, gold=tuple(range(place, place + len(gold))))


def sample_of(row: Any, number: int) -> Sample:
    """Return the sample of a row in the format of Lost in the Middle."""
    question, answers = question_and_answers(row["question"], row["answers"])
    passages = tuple(Segment(str(one.get("title", "")), one["text"]) for one in row["ctxs"])
    if not all(visible(one.text) for one in passages):
        raise ValueError("a passage of ctxs has no visible text")
    gold = tuple(place for place, one in enumerate(row["ctxs"]) if one.get("isgold"))
    if not gold:
        raise ValueError("no passage of ctxs has isgold")
    return Sample(
        number, question, answers, passages, gold, str(row.get("source", "")), int(row.get("tokens", 0)),
        int(row.get("length_bin", 0)), int(row.get("rejected", 0)),
    )  # fmt: skip


class SampleMaker:
    """Makes the sample of each number; the number and the settings alone decide it.

    The segments of a pair stand at places that are drawn uniformly, without those of other samples mattering.

    Source: An et al. (2024), IN2/FILM, section 3, https://arxiv.org/abs/2404.16811
    Differs from the paper: lengths are balanced by drawing an equal number of samples for each part of their range
        instead of by rejection; segments around a pair that hold its answer are left out.

    Args:
        sources: What makes the pairs, in turn.
        count_tokens: Returns the number of tokens of a text.
        segments: What stands around the pairs; each source's own segments if empty.
        contamination: What may not occur.
    """

    def __init__(
        self,
        sources: list[PairSource],
        settings: DataSettings,
        count_tokens: Callable[[str], int],
        segments: list[Segment],
        contamination: Contamination,
    ) -> None:
        self._sources, self._settings, self._count = sources, settings, count_tokens
        self._segments, self._contamination = segments, contamination

    def make(self, number: int) -> Sample:
        """Return the sample of a number."""
        index, which = divmod(number, len(self._sources))
        source = self._sources[which]
        length_bin = self._settings.length_bin(index)
        for attempt in range(MOST_DRAWS):
            random = drawn(self._settings.seed, number, attempt)
            several = random.random() < self._settings.multi
            pair = source.pair(index, random, SEGMENTS_OF_MULTI if several else 1)
            if pair is not None and not self._contamination.in_pair(pair):
                target = random.uniform(*self._settings.bounds(length_bin))
                return self._placed(number, source, pair, target, length_bin, attempt, random)
        raise ConfigError(
            f"sample {number}: {source.name} gave no usable pair in {MOST_DRAWS} draws; give other texts or pairs, or "
            "fewer evaluation files"
        )

    def _placed(
        self,
        number: int,
        source: PairSource,
        pair: Pair,
        target: float,
        length_bin: int,
        rejected: int,
        random: Random,
    ) -> Sample:
        """Return the sample of a pair with so many tokens that another segment would lead away from the target."""
        tokens = sum(self._count(one.text) for one in pair.segments)
        around: list[Segment] = []
        while tokens < target:
            other = self._filler(source, pair, around, random)
            more = self._count(other.text)
            if around and tokens + more / 2 > target:
                break
            around.append(other)
            tokens += more
        total = len(around) + len(pair.segments)
        places = sorted(random.sample(range(total), len(pair.segments)))
        own = dict(zip(places, random.sample(pair.segments, len(pair.segments)), strict=True))
        others = iter(around)
        passages = tuple(own[place] if place in own else next(others) for place in range(total))
        return Sample(
            number, pair.question, pair.answers, passages, tuple(places), source.name, tokens, length_bin, rejected
        )

    def _filler(self, source: PairSource, pair: Pair, around: list[Segment], random: Random) -> Segment:
        known = {one.text for one in (*pair.segments, *around)}
        answer_in = re.compile(
            "|".join(rf"(?<!\w){re.escape(answer)}(?!\w)" for answer in pair.answers), re.IGNORECASE
        )
        own = random.sample(pair.around, len(pair.around))
        for draw in range(len(own) + MOST_DRAWS):
            if draw < len(own):
                other = own[draw]
            else:
                other = random.choice(self._segments) if self._segments else source.filler(random)
            answered = answer_in.search(other.text) is not None
            if other.text not in known and not answered and not self._contamination.in_segment(other):
                return other
        raise ConfigError(
            f"{source.name}: too few different segments to stand around a pair ({len(around)} found); give more "
            "--texts or lower --max-tokens"
        )


def malformed_row(path: object, number: int, reason: str) -> EvaluationError:
    """Return the error for a row that is no training sample."""
    return EvaluationError(
        f"{path}:{number} is not a training sample ({reason}); it needs question, answers and ctxs with text, of "
        "which one or more have isgold; rag-posfix train data makes such files"
    )
