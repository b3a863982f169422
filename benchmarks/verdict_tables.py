"""Rows of the tables of ``benchmarks.verdicts``: both verdicts, and what ``auto`` gives on unseen questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.study_tables import Head, Row, short


def verdicts(heads: Sequence[Head], questions: str) -> Iterator[Row]:
    """Yield a row per data set: how the verdicts with and without labels agree, and what their choices reach."""
    yield [
        "model, data", "questions", "rank correlation, p (arrangements)", "of the stable ones",
        "best with labels", "nearest to `none`", "nearest - `none`", "chosen without labels", "chosen - `none`",
        "chosen - best", "mean of the stable ones",
    ]  # fmt: skip
    for name, by_questions in heads[0]["summary"].items():
        result = by_questions[questions]
        if result is None:
            yield [name, "0", *["-"] * 9]
            continue
        keys = ("best_with_labels", "nearest_to_none", "chosen_without_labels")
        worst = {key: row["worst"] for key, row in result["arrangements"].items()}
        best, nearest, chosen = (f"`{result[key]}` {short(f'{worst[result[key]]:.2f}')}" for key in keys)
        stable = result["stable_worst"]
        yield [
            name, str(result["questions"]),
            *(_rank_correlation(result[key]) for key in ("correlation", "correlation_of_stable")),
            best, nearest, _with_interval(result["nearest_minus_none"]), chosen,
            _with_interval(result["chosen_minus_none"]),
            "same" if best == chosen else _with_interval(result["chosen_minus_best"]),
            "-" if stable is None else short(f"{stable:.2f}"),
        ]  # fmt: skip


def _with_interval(result: Mapping[str, Any]) -> str:
    low, high = result["ci95"]
    return short(f"{result['accuracy']:+.2f} [{low:+.2f}, {high:+.2f}]")


def _rank_correlation(result: Mapping[str, float] | None) -> str:
    return "-" if result is None else short(f"{result['spearman']:+.2f}, {result['p']:.2f} ({result['n']})")


def unseen(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per data set: what ``auto`` chose, and its accuracy on unseen questions against other choices."""
    yield [
        "model, data", "questions", "chosen (times of 6)", "better beyond noise", "`auto`: worst, mean",
        "`none`: worst, mean, best", "`auto` - `none`, worst", "`auto` - `none`, mean",
        "worst of `auto` - best of `none`", "`auto` - only if better, worst", "`auto` - default, worst",
        "best on all questions", "`auto` - best, worst",
    ]  # fmt: skip
    for name, by_questions in heads[0]["summary"].items():
        result = by_questions["unseen"]
        accuracy, minus = result["accuracy"], result["auto_minus"]
        auto, none = (
            short(", ".join(f"{accuracy[f'{title}_{column}']:.2f}" for column in columns))
            for title, columns in (("auto", ("worst", "mean")), ("none", ("worst", "mean", "best")))
        )
        best = short(f"{accuracy['oracle_worst']:.2f}")
        # all of ``COMPARED``, the best on all questions last
        differences = [_with_interval(minus[other]) if any(minus[other]["ci95"]) else "same" for other in minus]
        yield [
            name, str(result["questions"]), ", ".join(f"`{label}` ({n})" for label, n in result["chosen"].items()),
            str(result["better"]), auto, none,
            *differences[:-1], f"`{result['oracle']}` {best}", differences[-1],
        ]  # fmt: skip


VERDICT_LAYOUTS: dict[str, Callable[[Sequence[Head]], Iterator[Row]]] = {
    "verdicts": partial(verdicts, questions="all"),
    "verdicts-answered-alone": partial(verdicts, questions="answered alone"),
    "verdicts-auto": unseen,
}
"""By name, as in ``benchmarks.tables.LAYOUTS``."""
