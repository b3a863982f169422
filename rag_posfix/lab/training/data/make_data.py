"""Makes training data: pairs of a teacher, samples, their statistics, and the figure of the gold positions.

Training samples: how they are drawn, and their file.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_prompt
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError, EvaluationError
from rag_posfix.evaluation.data.questions import PositionExample, malformed, question_and_answers, visible
from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent, writing_results
from rag_posfix.lab.training.data.pairs import (
    Contamination,
    FilePairs,
    Pair,
    PairSource,
    Segment,
    seeded_random,
    template_sources,
)
from rag_posfix.lab.training.data.settings import DataSettings
from rag_posfix.text import content_hash, whole_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


_log = logging.getLogger(__name__)
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)
_TASK = (
    "Write one question about the text below, and its answer. The question must be understandable without the text, "
    "and nothing but the text may be needed for the answer. The answer must be short and copied from the text. "
)
_TWO = "There are two texts: the answer must need both. "
_FORM = 'Return one JSON object: {"question": "...", "answer": "..."}'
MOST_TOKENS = 256


class TeacherPairs:
    """Pairs that a teacher writes about segments that are drawn at random.

    An answer that is no JSON object of this form, or is in none of the segments, gives no pair.

    Source: An et al. (2024), IN2/FILM, section 3.1, https://arxiv.org/abs/2404.16811

    Args:
        teacher: The model, for example a remote generator.
        segments: What questions are asked about.

    Raises:
        ConfigError: there are fewer than two segments.
    """

    name = "teacher"

    def __init__(self, teacher: Generator, segments: Sequence[Segment]) -> None:
        if len(segments) < 2:
            raise ConfigError(f"a teacher needs two segments of text or more, got {len(segments)}; give more --texts")
        self._teacher = teacher
        self._segments = segments

    def pair(self, index: int, random: Random, segments: int) -> Pair | None:
        """Ask the teacher about ``segments`` neighbouring segments; None if its answer cannot be used."""
        count = min(segments, len(self._segments))
        first = random.randrange(len(self._segments) - count + 1)
        excerpt = tuple(self._segments[first : first + count])
        texts = "\n\n".join(f"Text {number}:\n{segment.text}" for number, segment in enumerate(excerpt, start=1))
        prompt = f"{_TASK}{_TWO if count > 1 else ''}{_FORM}\n\n{texts}"
        layout = tokenize_prompt(self._teacher.encoder, PromptTemplate(), prompt, has_passages=False).with_passages(())
        request = GenerationRequest(layout, MitigationChoice("none"), Sampling(max_tokens=MOST_TOKENS))
        pair = read_answer(self._teacher.generate(request).text, excerpt)
        if pair is None:
            _log.info("the teacher's answer about segment %d cannot be used", first)
        return pair

    def filler(self, random: Random) -> Segment:
        """Return another segment."""
        return random.choice(self._segments)


def read_answer(text: str, segments: tuple[Segment, ...]) -> Pair | None:
    """Return the pair of a teacher's answer, or None if it has another form or its answer is in no segment."""
    match = _OBJECT.search(text)
    try:
        payload = json.loads(match[0]) if match else None
    except ValueError:
        return None
    if not isinstance(payload, dict):
        return None
    question, answer = payload.get("question"), payload.get("answer")
    if not (isinstance(question, str) and isinstance(answer, str) and question.strip() and answer.strip()):
        return None
    if not any(answer.strip().lower() in segment.text.lower() for segment in segments):
        return None
    return Pair(question.strip(), (answer.strip(),), segments)


PLACE_BINS = 10


def place_counts(samples: Iterable[Sample], bins: int = PLACE_BINS) -> tuple[list[int], list[float]]:
    """Return how many gold passages are in each bin of their prompts, and how many are expected there.

    Formula: position p of n passages is in bin floor(bins p / n). A sample with g gold passages is expected to have
        g |{p: bin(p) = b}| / n of them in bin b. For one gold passage per sample this is exact; several in one
        sample are not independent, and their statistic is smaller than chi-square.
    """
    counts, expected = [0] * bins, [0.0] * bins
    for sample in samples:
        n = len(sample.passages)
        for position in range(n):
            expected[bins * position // n] += len(sample.gold) / n
        for position in sample.gold:
            counts[bins * position // n] += 1
    return counts, expected


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int, float]:
    """Return Pearson's statistic, its degrees of freedom, and the probability of a larger one.

    Formula: X = sum (O - E)^2 / E over the bins with E > 0; p = Q(df / 2, X / 2), the regularised upper incomplete
        gamma function.
    """
    import torch

    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    degrees = max(len(pairs) - 1, 0)
    if not degrees:
        return statistic, 0, 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, degrees, float(torch.special.gammaincc(half[0], half[1]))


def statistics_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what is counted of training data, as JSON."""
    observed, expected = place_counts(samples)
    statistic, degrees, p_value = chi_square(observed, expected)
    tokens = sorted(sample.tokens for sample in samples)
    return {
        "n": len(samples),
        "sources": dict(sorted(Counter(sample.source for sample in samples).items())),
        "gold_passages": _count_values(len(sample.gold) for sample in samples),
        "length_bins": _count_values(sample.length_bin for sample in samples),
        "tokens": {"least": tokens[0], "median": tokens[len(tokens) // 2], "most": tokens[-1]},
        "passages": {"least": min(_sizes(samples)), "most": max(_sizes(samples))},
        "rejected": sum(sample.rejected for sample in samples),
        "places": {
            "found": observed,
            "expected": [round(count, 3) for count in expected],
            "chi_square": statistic,
            "degrees_of_freedom": degrees,
            "p_value": p_value,
        },
    }


def _sizes(samples: Sequence[Sample]) -> list[int]:
    return [len(sample.passages) for sample in samples]


def _count_values(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items())}


CAPTION = (
    "Gold passages in each part of the prompt, next to those expected of uniform positions; do not conclude from a "
    "large p that positions are uniform, only that these samples do not show otherwise."
)


def draw_places(head: Mapping[str, Any]) -> Figure:
    """Return the figure of a record of ``train data``: gold passages by the part of the prompt that they are in."""
    positions = head["summary"]["places"]
    figure, axes = new_axes((5.4, 3.0))
    bins = range(len(positions["found"]))
    axes.bar(bins, positions["found"], 0.7, color=OTHER_COLORS[0], label="found")
    axes.step(bins, positions["expected"], where="mid", color=OTHER_COLORS[2], label="expected")
    axes.set_xlabel("part of the prompt, from its beginning")
    axes.set_ylabel("gold passages")
    axes.set_title(f"places of gold passages: p = {positions['p_value']:.2f}", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    return figure


@dataclass(frozen=True, slots=True)
class DataSources:
    """Where pairs and segments come from.

    Attributes:
        templates: Names of templates, separated by commas; None for none.
        pairs: Questions with gold passages, by file; files take turns.
        teacher: Writes questions about ``segments``.
        segments: Stand around all pairs; if empty, each source has its own.
        against: Evaluation data that may not occur in the samples.
    """

    templates: str | None = None
    pairs: Sequence[Sequence[PositionExample]] = ()
    teacher: Generator | None = None
    segments: Sequence[Segment] = ()
    against: Sequence[PositionExample] = ()


def make_training_data(
    sources: DataSources,
    settings: DataSettings,
    count_tokens: Callable[[str], int],
    out: Path,
    *,
    tokenizer: str = "",
    progress: Progress = silent,
) -> ExperimentRecord:
    """Write a file of training samples to ``out``, and its statistics.

    The same arguments give the same file, also after interruptions; answers of a teacher are those of the run that
    wrote them. A finished file is not made again.

    Args:
        sources: Templates, pairs, a teacher; at least one of them.
    """
    contamination = Contamination(sources.against, settings.n_gram)
    pair_sources: list[PairSource] = list(template_sources(sources.templates)) if sources.templates else []
    removed = 0
    for file in sources.pairs:
        file_pairs = FilePairs(file, settings.seed, settings.segment_words, contamination, settings.own_distractors)
        removed += file_pairs.removed
        pair_sources.append(file_pairs)
    if sources.teacher is not None:
        pair_sources.append(TeacherPairs(sources.teacher, sources.segments))
    if not pair_sources:
        raise ConfigError("training data needs a source of pairs; give --templates, --pairs or --teacher")
    run = settings.digest(
        templates=sources.templates, tokenizer=tokenizer,
        pairs=[_digest(file) for file in sources.pairs], against=_digest(sources.against),
        teacher=None if sources.teacher is None else sources.teacher.fingerprint,
        segments=content_hash(*(text for segment in sources.segments for text in (segment.title, segment.text))),
    )  # fmt: skip
    maker = SampleMaker(pair_sources, settings, count_tokens, list(sources.segments), contamination)
    with progress("making training samples") as report:
        path = write_samples(out, run, settings.samples, maker.make, report)
    summary = {**statistics_of(list(read_samples(path))), "removed_pairs": removed, "n_grams": len(contamination)}
    head = {
        "kind": "train-data", **environment(), "settings": asdict(settings), "run": run, "summary": summary
    }  # fmt: skip
    record = ExperimentRecord(head, (), {}).write(out)
    record = with_figure(record, draw_places, CAPTION)
    return replace(record, files={**record.files, "samples": path})


def _digest(examples: Sequence[PositionExample]) -> str:
    texts: list[str] = []
    for example in examples:
        passages = (document.page_content for document in (*example.gold, *example.distractors))
        texts += (example.id, example.question, *example.answers, *passages)
    return content_hash(*texts)
