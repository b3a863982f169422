"""Measures of rankings by ir-measures over pytrec-eval, with intervals, costs and paired comparisons."""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_posfix.errors import ConfigError, EvaluationError, missing_extra
from rag_posfix.evaluation.data.collection import Topic
from rag_posfix.evaluation.data.trec import Qrels, Run, write_run
from rag_posfix.evaluation.ranking.rankings import RankedTopics
from rag_posfix.evaluation.record import file_digest
from rag_posfix.evaluation.statistics import compare_all, difference_interval, mean

if TYPE_CHECKING:
    from ir_measures.measures import Measure

DEFAULT_MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")

Measures: TypeAlias = "Sequence[Measure]"
"""What to compute, as ``parse_measures`` returns it."""

MeasureValues = dict[str, dict[str, float]]
"""Measure -> query id -> value."""


def parse_measures(text: str = "") -> list[Measure]:
    """Return the default measures and those of ``text``, each once.

    Args:
        text: Names of ir-measures, separated by commas: ``AP``, ``Success@5``, ``P(rel=2)@5``.
    """
    irm = _import()
    names = [*DEFAULT_MEASURES, *(name.strip() for name in re.split(r",(?![^()]*\))", text) if name.strip())]
    measures: dict[str, Measure] = {}
    for name in names:
        measure = _parse(irm, name)
        measures.setdefault(str(measure), measure)
    return list(measures.values())


def compute_measures(measures: Measures, qrels: Qrels, run: Run) -> MeasureValues:
    """Return the value of each measure for each judged query.

    Measures are defined by trec_eval: nDCG has linear gains and log2 discounts, grades of 1 and above are relevant in
    the other measures, documents without judgement are not relevant, and recall includes judged documents that are not
    in the collection. A judged query without a ranking scores 0 and counts in every mean, as with ``trec_eval -c``.
    """
    irm = _import()
    scores = {query: dict(ranked) for query, ranked in run.items() if ranked}
    try:
        evaluator = irm.evaluator(list(measures), {query: dict(grades) for query, grades in qrels.items()})
        values: MeasureValues = {str(measure): {} for measure in measures}
        for metric in evaluator.iter_calc(scores):
            values[str(metric.measure)][metric.query_id] = float(metric.value)
    except Exception as error:  # programs outside of this one compute some measures, each failing in its own way
        names = ", ".join(map(str, measures))
        raise EvaluationError(f"ir-measures failed on {names} ({type(error).__name__}: {error})") from error
    for name, column in values.items():
        for query in qrels:
            if not math.isfinite(column.get(query, math.nan)):
                raise EvaluationError(f"measure {name} has no value for query {query!r}; leave the measure out")
    return {name: {query: column[query] for query in qrels} for name, column in values.items()}


def _parse(irm: Any, name: str) -> Measure:
    try:
        measure: Any = irm.parse_measure(name)
        measure.validate_params()
        if measure.params.get("cutoff", 1) < 1:
            raise ValueError("the cutoff must be at least 1")  # pytrec-eval ends the process over 0
        irm.evaluator([measure], {})
    except NameError as error:
        near = difflib.get_close_matches(re.split(r"[@(]", name)[0], list(irm.measures.registry), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"unknown measure {name!r}.{hint} ir-measures lists what there is") from error
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"measure {name!r} cannot be computed ({error}); write it as nDCG@10 or P(rel=2)@5, and install what "
            "ir-measures needs for it"
        ) from error
    parsed: Measure = measure
    return parsed


def _import() -> Any:
    try:
        import ir_measures
        import pytrec_eval  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "eval") from error
    return ir_measures


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedRun:
    """The rankings of one system, their measures, and the file of the TREC run if one was written."""

    ranked: RankedTopics
    values: MeasureValues
    file: Path | None


def run_files(folder: Path, labels: Sequence[str]) -> dict[str, Path]:
    """Return a file in ``folder`` for the run of each label, no two alike."""
    names: dict[str, Path] = {}
    for label in labels:
        plain = re.sub(r"[^\w.=+-]+", "-", label).strip("-.") or "run"
        number, path = 1, folder / f"{plain}.trec"
        while path in names.values():
            number += 1
            path = folder / f"{plain}-{number}.trec"
        names[label] = path
    return names


def evaluate_run(
    ranked: RankedTopics, topics: Sequence[Topic], measures: Measures, file: Path | None = None
) -> EvaluatedRun:
    """Measure rankings by exactly the scores that a TREC run of them holds, and write that run to ``file``."""
    run = ranked.run()
    if file is not None:
        write_run(file, run, file.stem)
    return EvaluatedRun(ranked, compute_measures(measures, {topic.id: topic.grades for topic in topics}, run), file)


def summarize_run(evaluated: EvaluatedRun) -> dict[str, Any]:
    """Return means over the topics, their intervals, and what a query cost.

    ``seconds``, ``forward_passes``, ``tokens_read`` and ``calls`` are means per query that had candidates; ``calls``
    (answers that the model was asked to write) is None where the reranker does not count them. ``ci95`` is the
    interval of each mean, queries resampled. ``run_file`` is the name of the TREC run, None where none was written.
    """
    rankings = list(evaluated.ranked.rankings.values())
    ranked = [ranking for ranking in rankings if ranking.ids]
    seconds = [ranking.seconds for ranking in ranked]
    calls = [float(ranking.calls) for ranking in ranked if ranking.calls is not None]
    values = {name: list(by_query.values()) for name, by_query in evaluated.values.items()}
    return {
        **{name: mean(scores) for name, scores in values.items()},
        "seconds": mean(seconds),
        "run_file": None if evaluated.file is None else evaluated.file.name,
        "run_sha256": None if evaluated.file is None else file_digest(evaluated.file),
        "ci95": {name: list(difference_interval(scores)) for name, scores in values.items()},
        "seconds_median": statistics.median(seconds) if seconds else 0.0,
        "calls": mean(calls) if calls else None,
        "forward_passes": mean([float(ranking.forward_passes) for ranking in ranked]),
        "tokens_read": mean([float(ranking.tokens_read) for ranking in ranked]),
        "queries": len(rankings),
        "queries_without_documents": len(rankings) - len(ranked),
        "reused": len(evaluated.ranked.reused),
    }


def compare_runs(runs: Sequence[EvaluatedRun]) -> list[dict[str, Any]]:
    """Return the comparison of every run with each before it, by every measure (see ``Comparison``)."""
    return [
        asdict(comparison)
        for name in runs[0].values
        for comparison in compare_all(name, {run.ranked.label: list(run.values[name].values()) for run in runs})
    ]


def per_query(runs: Sequence[EvaluatedRun], topics: Sequence[Topic]) -> Iterator[dict[str, Any]]:
    """Yield one row per system and query: its measures, its cost and its ranking."""
    for run in runs:
        for topic in topics:
            ranking = run.ranked.rankings[topic.id]
            yield {
                "query": topic.id,
                "run": run.ranked.label,
                **{name: values[topic.id] for name, values in run.values.items()},
                **ranking.cost(),
                "documents": list(ranking.ids),
                "reused": topic.id in run.ranked.reused,
            }
