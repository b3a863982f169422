"""Makes training data: sources of pairs in, a file of samples and its statistics out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rag_posfix.contracts.generator import Generator
from rag_posfix.errors import ConfigError
from rag_posfix.evaluation.data.questions import PositionExample
from rag_posfix.evaluation.figures import with_figure
from rag_posfix.evaluation.record import ExperimentRecord, Progress, environment, silent
from rag_posfix.text import content_hash
from rag_posfix.training.data.contamination import Contamination
from rag_posfix.training.data.given_pairs import GivenPairs
from rag_posfix.training.data.pair import PairSource, Segment
from rag_posfix.training.data.sample import SampleMaker
from rag_posfix.training.data.sample_file import read_samples, write_samples
from rag_posfix.training.data.settings import DataSettings
from rag_posfix.training.data.statistics import draw_places, statistics_of
from rag_posfix.training.data.teacher import TeacherPairs
from rag_posfix.training.data.templates import template_sources


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
    found: list[PairSource] = list(template_sources(sources.templates)) if sources.templates else []
    removed = 0
    for file in sources.pairs:
        given = GivenPairs(file, settings.seed, settings.segment_words, contamination, settings.own_distractors)
        removed += given.removed
        found.append(given)
    if sources.teacher is not None:
        found.append(TeacherPairs(sources.teacher, sources.segments))
    if not found:
        raise ConfigError("training data needs a source of pairs; give --templates, --pairs or --teacher")
    run = settings.digest(
        templates=sources.templates, tokenizer=tokenizer,
        pairs=[_digest(file) for file in sources.pairs], against=_digest(sources.against),
        teacher=None if sources.teacher is None else sources.teacher.fingerprint,
        segments=content_hash(*(part for one in sources.segments for part in (one.title, one.text))),
    )  # fmt: skip
    maker = SampleMaker(found, settings, count_tokens, list(sources.segments), contamination)
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
    texts = (text for one in examples for text in (one.id, one.question, *one.answers, *_passages(one)))
    return content_hash(*texts)


def _passages(example: PositionExample) -> list[str]:
    return [document.page_content for document in (*example.gold, *example.distractors)]
