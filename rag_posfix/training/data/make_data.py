"""Makes training data: pairs of a teacher, samples, their statistics, and the figure of the gold positions."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rag_posfix.assembly.templates import PromptTemplate
from rag_posfix.assembly.tokenization import tokenize_prompt
from rag_posfix.contracts.generator import Generator
from rag_posfix.contracts.request import GenerationRequest, MitigationChoice, Sampling
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.figures import OTHER_COLORS, new_axes, with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent
from rag_posfix.text import content_hash
from rag_posfix.training.data.pairs import Contamination, FilePairs, Pair, PairSource, Segment, template_sources
from rag_posfix.training.data.sample import Sample, SampleMaker, read_samples, write_samples
from rag_posfix.training.data.settings import DataSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    record = with_figure(record, draw_places)
    return replace(record, files={**record.files, "samples": path})


def _digest(examples: Sequence[PositionExample]) -> str:
    texts: list[str] = []
    for example in examples:
        passages = (document.page_content for document in (*example.gold, *example.distractors))
        texts += (example.id, example.question, *example.answers, *passages)
    return content_hash(*texts)
