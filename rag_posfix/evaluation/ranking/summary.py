"""What rankings are worth: measures, means with intervals, cost, paired comparisons, and one row per query."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rag_posfix.evaluation.data.collection import Topic
from rag_posfix.evaluation.data.trec import write_run
from rag_posfix.evaluation.ranking.measures import Measured, Measures, measure
from rag_posfix.evaluation.ranking.rankings import Ranking
from rag_posfix.evaluation.ranking.rerank import RankedTopics
from rag_posfix.evaluation.ranking.significance import compare_all, difference_interval
from rag_posfix.evaluation.record import file_digest
from rag_posfix.evaluation.statistics import mean

__all__ = ["MeasuredRun", "comparisons", "measure_run", "per_query", "run_files", "summary"]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """The rankings of one system, written and measured.

    Attributes:
        ranked: The rankings.
        values: Measure -> query id -> value.
        file: The TREC run.
    """

    ranked: RankedTopics
    values: Measured
    file: Path


def run_files(folder: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Return a file name for the run of each label, no two alike.

    Args:
        folder: Where runs go.
        labels: What the systems are called.
    """
    names: dict[str, Path] = {}
    for label in labels:
        plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-.") or "run"
        number, path = 1, folder / f"{plain}.trec"
        while path in names.values():
            number += 1
            path = folder / f"{plain}-{number}.trec"
        names[label] = path
    return names


def measure_run(ranked: RankedTopics, topics: Sequence[Topic], measures: Measures, file: Path) -> MeasuredRun:
    """Write rankings as a TREC run and measure exactly the scores that were written.

    Args:
        ranked: The rankings.
        topics: The topics with their judgements; all of them count.
        measures: What to compute.
        file: Where the run goes.

    Raises:
        EvaluationError: the file cannot be written, or a measure cannot be computed.
    """
    run = ranked.run()
    write_run(file, run, file.stem)
    return MeasuredRun(ranked, measure(measures, {topic.id: topic.grades for topic in topics}, run), file)


def summary(one: MeasuredRun) -> dict[str, Any]:
    """Return means over the topics, their intervals, and what a query cost.

    ``seconds``, ``forward_passes``, ``tokens_read`` and ``calls`` are means per query that had candidates; ``calls``
    (answers that the model was asked to write) is None
    where the reranker does not count them. ``ci95`` is the interval of each mean, queries resampled.

    Args:
        one: The run.
    """
    asked = [ranking for ranking in one.ranked.rankings.values() if ranking.ids]
    seconds = [ranking.seconds for ranking in asked]
    calls = [float(ranking.calls) for ranking in asked if ranking.calls is not None]
    return {
        **{name: mean(list(values.values())) for name, values in one.values.items()},
        "seconds": mean(seconds),
        "run_file": str(one.file),
        "run_sha256": file_digest(one.file),
        "ci95": {name: list(difference_interval(list(values.values()))) for name, values in one.values.items()},
        "seconds_median": statistics.median(seconds) if seconds else 0.0,
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(ranking.forward_passes) for ranking in asked]),
        "tokens_read": mean([float(ranking.tokens_read) for ranking in asked]),
        "queries": len(one.ranked.rankings),
        "queries_without_documents": len(one.ranked.rankings) - len(asked),
        "reused": len(one.ranked.reused),
    }


def comparisons(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Return the comparison of every run with each before it, by every measure (see ``Comparison``).

    Args:
        runs: The first stage and the rerankers, over the same topics.
    """
    return [
        asdict(found)
        for name in runs[0].values
        for found in compare_all(name, {run.ranked.label: list(run.values[name].values()) for run in runs})
    ]


def per_query(runs: Sequence[MeasuredRun], topics: Sequence[Topic]) -> Iterator[dict[str, Any]]:
    """Yield one row per system and query: its measures, what it cost and its ranking.

    Args:
        runs: The first stage and the rerankers.
        topics: The topics.
    """
    for run in runs:
        for topic in topics:
            ranking = run.ranked.rankings[topic.id]
            yield {
                "query": topic.id,
                "run": run.ranked.label,
                **{name: values[topic.id] for name, values in run.values.items()},
                **_cost(ranking),
                "documents": list(ranking.ids),
                "reused": topic.id in run.ranked.reused,
            }


def _cost(ranking: Ranking) -> Mapping[str, Any]:
    return {
        "seconds": ranking.seconds,
        "calls": ranking.calls,
        "forward_passes": ranking.forward_passes,
        "tokens_read": ranking.tokens_read,
    }
