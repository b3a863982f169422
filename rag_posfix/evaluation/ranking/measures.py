"""Measures of rankings by name, computed by ir-measures over pytrec-eval. Knows nothing of documents."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_posfix.errors import ConfigError, EvaluationError, missing_extra
from rag_posfix.evaluation.data.trec import Qrels, Run

if TYPE_CHECKING:
    from ir_measures.measures import Measure

__all__ = ["DEFAULT_MEASURES", "Measured", "Measures", "measure", "parse_measures"]

DEFAULT_MEASURES = ("nDCG@10", "RR@10", "R@10", "P@1")

Measures: TypeAlias = "Sequence[Measure]"
"""What to compute, as ``parse_measures`` returns it."""

Measured = dict[str, dict[str, float]]
"""Measure -> query id -> value."""


def parse_measures(text: str = "") -> list[Measure]:
    """Return the default measures and those that ``text`` names, each once.

    Args:
        text: Names as ir-measures writes them, separated by commas: ``AP``, ``Success@5``, ``P(rel=2)@5``.

    Raises:
        ConfigError: ir-measures is not installed, does not know a measure, or cannot compute it as it is installed.
    """
    irm = _import()
    names = [*DEFAULT_MEASURES, *(part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip())]
    found: dict[str, Measure] = {}
    for name in names:
        one = _parse(irm, name)
        found.setdefault(str(one), one)
    return list(found.values())


def measure(measures: Measures, qrels: Qrels, run: Run) -> Measured:
    """Return the value of each measure for each judged query.

    trec_eval decides what a measure is: linear gains and log2 discounts in nDCG, grades of 1 and above relevant
    elsewhere, documents without judgement not relevant, judged documents that no one can find part of recall. A judged
    query that the run lacks scores 0 and counts in every mean, as with ``trec_eval -c``.

    Args:
        measures: What to compute.
        qrels: The judgements, of exactly the queries that count.
        run: Scores that differ within each query.

    Raises:
        EvaluationError: what computes a measure failed, for instance a program that it needs.
    """
    irm = _import()
    scores = {query: dict(ranked) for query, ranked in run.items() if ranked}
    try:
        per_query = irm.evaluator(list(measures), {query: dict(grades) for query, grades in qrels.items()}).iter_calc(
            scores
        )
        values: Measured = {str(one): {} for one in measures}
        for found in per_query:
            values[str(found.measure)][found.query_id] = float(found.value)
    except Exception as error:  # programs outside of this one compute some measures, each failing in its own way
        names = ", ".join(str(one) for one in measures)
        raise EvaluationError(f"ir-measures failed on {names} ({type(error).__name__}: {error})") from error
    for name, column in values.items():
        for query in qrels:
            if not math.isfinite(column.get(query, math.nan)):
                raise EvaluationError(f"measure {name} has no value for query {query!r}; leave the measure out")
    return {name: {query: column[query] for query in qrels} for name, column in values.items()}


def _parse(irm: Any, name: str) -> Measure:
    try:
        one = irm.parse_measure(name)
        one.validate_params()
        if "cutoff" in one.params and one.params["cutoff"] < 1:
            raise ValueError("the cutoff must be at least 1")  # pytrec-eval ends the process over 0
        irm.evaluator([one], {})
    except NameError as error:
        near = difflib.get_close_matches(re.split(r"[@(]", name)[0], list(irm.measures.registry), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"unknown measure {name!r}.{hint} ir-measures lists what there is") from error
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"measure {name!r} cannot be computed ({error}); write it as nDCG@10 or P(rel=2)@5, and install what "
            "ir-measures needs for it"
        ) from error
    parsed: Measure = one
    return parsed


def _import() -> Any:
    try:
        import ir_measures
        import pytrec_eval  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "eval") from error
    return ir_measures
