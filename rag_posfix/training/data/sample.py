"""Training samples: how they are drawn, and their file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from langchain_core.documents import Document

from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import malformed, question_and_answers, visible
from rag_posfix.evaluation.record import writing_results
from rag_posfix.text import whole_words
from rag_posfix.training.data.pairs import Contamination, Pair, PairSource, Segment, seeded_random
from rag_posfix.training.data.settings import DataSettings

MOST_DRAWS = 200
"""Draws of a pair, or of a segment around it, in a row that may be rejected."""
SEGMENTS_OF_MULTI = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A question, its answers, and passages of which some are gold.

    Attributes:
        id: Its number in the file.
        question: The question.
        answers: Accepted answers; the first is trained on.
        passages: All passages, in the order of the prompt.
        gold: Positions of the passages that the answer depends on, ascending.
        source: What made the pair.
        tokens: Tokens of the passages' texts together.
        length_bin: The part of the range of lengths that it was drawn for.
        rejected: Rejected draws before it.
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
                {"title": passage.title, "text": passage.text, "isgold": position in self.gold}
                for position, passage in enumerate(self.passages)
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
            Document(page_content=passage.text, metadata={"title": passage.title}, id=f"{self.id}-{position}")
            for position, passage in enumerate(self.passages)
        ]

    def move_gold(self, position: int) -> Sample:
        """Return the sample with its gold passages together, in their order, the first of them at ``position``."""
        last = len(self.passages) - len(self.gold)
        if not 0 <= position <= last:
            raise ConfigError(f"sample {self.id}: place {position} of its gold passages must be between 0 and {last}")
        distractors = [passage for index, passage in enumerate(self.passages) if index not in self.gold]
        gold = [self.passages[index] for index in self.gold]
        passages = (*distractors[:position], *gold, *distractors[position:])
        return replace(self, passages=passages, gold=tuple(range(position, position + len(gold))))


def sample_of(row: Any, number: int) -> Sample:
    """Return the sample of a row in the format of Lost in the Middle."""
    question, answers = question_and_answers(row["question"], row["answers"])
    passages = tuple(Segment(str(context.get("title") or ""), context["text"]) for context in row["ctxs"])
    if not all(visible(passage.text) for passage in passages):
        raise ValueError("a passage of ctxs has no visible text")
    gold = tuple(position for position, context in enumerate(row["ctxs"]) if context.get("isgold"))
    if not gold:
        raise ValueError("no passage of ctxs has isgold")
    return Sample(
        number, question, answers, passages, gold, str(row.get("source", "")), int(row.get("tokens", 0)),
        int(row.get("length_bin", 0)), int(row.get("rejected", 0)),
    )  # fmt: skip


class SampleMaker:
    """Makes the sample of each number; the number and the settings alone decide it.

    The positions of the segments of a pair are drawn uniformly, independently of other samples.

    Source: An et al. (2024), IN2/FILM, section 3, https://arxiv.org/abs/2404.16811
    Differs from the paper: lengths are balanced by drawing an equal number of samples for each part of their range
        instead of by rejection; segments around a pair that hold its answer are left out.

    Args:
        sources: What makes the pairs, in turn.
        count_tokens: Returns the number of tokens of a text.
        segments: Distractors of the pairs; each source's own segments if empty.
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
            random = seeded_random(self._settings.seed, number, attempt)
            several = random.random() < self._settings.multi
            pair = source.pair(index, random, SEGMENTS_OF_MULTI if several else 1)
            if pair is not None and not self._contamination.in_pair(pair):
                target = random.uniform(*self._settings.bounds(length_bin))
                return self._build(number, source, pair, target, length_bin, attempt, random)
        raise ConfigError(
            f"sample {number}: {source.name} gave no usable pair in {MOST_DRAWS} draws; give other texts or pairs, or "
            "fewer evaluation files"
        )

    def _build(
        self,
        number: int,
        source: PairSource,
        pair: Pair,
        target: float,
        length_bin: int,
        rejected: int,
        random: Random,
    ) -> Sample:
        """Return the sample of a pair; segments are added up to the nearest token count."""
        tokens = sum(self._count(segment.text) for segment in pair.segments)
        around: list[Segment] = []
        while tokens < target:
            filler = self._filler(source, pair, around, random)
            more = self._count(filler.text)
            if around and tokens + more / 2 > target:
                break
            around.append(filler)
            tokens += more
        total = len(around) + len(pair.segments)
        positions = sorted(random.sample(range(total), len(pair.segments)))
        gold_segments = dict(zip(positions, random.sample(pair.segments, len(pair.segments)), strict=True))
        fillers = iter(around)
        passages = tuple(
            gold_segments[position] if position in gold_segments else next(fillers) for position in range(total)
        )
        return Sample(
            number, pair.question, pair.answers, passages, tuple(positions), source.name, tokens, length_bin, rejected
        )

    def _filler(self, source: PairSource, pair: Pair, around: list[Segment], random: Random) -> Segment:
        used_texts = {segment.text for segment in (*pair.segments, *around)}
        answer_in = re.compile("|".join(map(whole_words, pair.answers)), re.IGNORECASE)
        distractors = random.sample(pair.around, len(pair.around))
        for draw in range(len(distractors) + MOST_DRAWS):
            if draw < len(distractors):
                filler = distractors[draw]
            else:
                filler = random.choice(self._segments) if self._segments else source.filler(random)
            answered = answer_in.search(filler.text) is not None
            if filler.text not in used_texts and not answered and not self._contamination.in_segment(filler):
                return filler
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


SAMPLES = "samples.jsonl"
_UNFINISHED = ".partial"


def write_samples(
    folder: Path, run: str, count: int, make: Callable[[int], Sample], report: Callable[[int, int], None]
) -> Path:
    """Write ``count`` samples to a file in ``folder``, and continue the file of an interrupted run.

    Samples are appended to ``samples.jsonl.partial``, which is renamed when it is complete; an incomplete last line
    of it is removed. So the file of a run that was interrupted equals the file of an uninterrupted run.

    Raises:
        ConfigError: one of the two files has rows of another ``run``, such as answers of a teacher, or other rows.
    """
    final = folder / SAMPLES
    partial = folder / (SAMPLES + _UNFINISHED)
    with writing_results(folder):
        if final.exists():
            if _whole_lines(final, run)[0] != count:
                raise _other_samples(final)
            report(count, count)
            return final
        folder.mkdir(parents=True, exist_ok=True)
        done, length = _whole_lines(partial, run)
        if partial.exists():
            os.truncate(partial, length)
        with partial.open("ab") as file:
            for number in range(done, count):
                row = {**make(number).row(), "run": run}
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                report(number + 1, count)
            os.fsync(file.fileno())
        os.replace(partial, final)
    return final


def _whole_lines(path: Path, run: str) -> tuple[int, int]:
    """Return the number of complete rows of a file and their bytes; ConfigError if one is not of this run."""
    done = length = 0
    if not path.exists():
        return 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                is_of_run = (row["run"], row["id"]) == (run, done)
            except (ValueError, KeyError, TypeError):
                is_of_run = False
            if not is_of_run:
                raise _other_samples(path)
            done += 1
            length += len(line)
    return done, length


def _other_samples(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} holds other samples than this command makes; choose another --out, or remove the file"
    )


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file in the format of Lost in the Middle."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if line.strip():
                    yield _read(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(
            f"{path} cannot be read ({error}); give a file of training samples, as rag-posfix train data writes it"
        ) from error


def _read(path: Path, number: int, line: str) -> Sample:
    try:
        return sample_of(json.loads(line), number)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise malformed_row(path, number + 1, malformed(error)) from error
