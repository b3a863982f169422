"""Whether what is measured without labels says which arrangement is right, from kept records with labels.

python -m benchmarks.verdicts --out OUT.json ["NAME=RECORD" ...]

Each RECORD is a position experiment in benchmarks/results. With labels an arrangement has its accuracy at the worst
position, then the mean; without, the share of questions with one answer at all positions, then the agreement with what
``none`` usually answers. Both rank the arrangements, on all questions and on those that the model answers from the
gold passage alone. ``measure`` names the default where there are no labels; what both choices reach is compared.
``unseen`` is what ``auto`` gives on questions that it was not chosen on, with labels.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS, position_row
from benchmarks.tables import DEFAULT
from rag_posfix.evaluation.answers.experiment import BASELINE, GOLD_ONLY, PositionRow, is_sound
from rag_posfix.evaluation.record import read_record, save_record
from rag_posfix.evaluation.statistics import difference_interval, mean, randomisation_p
from rag_posfix.measuring.choice import (
    Scores,
    choose,
    measured,
    order_matters,
    scores_with_labels,
    scores_without_labels,
    usual_answers,
)
from rag_posfix.measuring.measure import rows_by_question

LENGTHS = {
    "Lost in the Middle, 10": "litm-10",
    "Lost in the Middle, 20": "litm-20",
    "XQuAD, 5": "xquad-5",
    "XQuAD, 10": "xquad-10",
    "HotpotQA, 10": "hotpotqa-10",
}
RECORDS = {
    # Every arrangement was run with earlier prompts alone.
    **{f"SmolLM2-135M: {name}": f"positions-{data}-earlier-prompts" for name, data in LENGTHS.items()},
    "Qwen2.5-Coder-1.5B: Lost in the Middle, 10": "positions-qwen15-litm-10",
    "Qwen2.5-Coder-1.5B: Lost in the Middle, 20": "positions-qwen15-litm-20",
    "Qwen2.5-Coder-1.5B: XQuAD, 5": "positions-qwen15-xquad-5",
    "Qwen2.5-Coder-1.5B: XQuAD, 10": "positions-qwen15-xquad-10",
    "Qwen2.5-Coder-1.5B: HotpotQA, 10": "positions-qwen15-hotpotqa-10",
    "Qwen2.5-Coder-0.5B: Lost in the Middle, 10": "positions-qwen05-litm-10",
    "Qwen2.5-Coder-0.5B: XQuAD, 5": "positions-qwen05-xquad-5",
    **{f"gemma-3-270m: {name}": f"positions-gemma-{data}-default" for name, data in LENGTHS.items()},
}
LARGE_DEFAULTS = {"Qwen2.5-Coder-1.5B-Instruct": "yes_no:top_n=3/reverse/none"}
"""The default of a model where it is not that of small models; a file of it has the suffix of its format."""
ALL, ANSWERED_ALONE, UNSEEN = "all", "answered alone", "unseen"
FOLDS = 6
COMPARED = ("none_worst", "none_mean", "none_best", "only_better_worst", "default_worst", "oracle_worst")
"""What ``auto`` is compared with on unseen questions: its mean with the mean of ``none``, else its worst position."""
LEAST = 3
"""Arrangements that a rank correlation needs: that of two is 1 or -1 whatever they are."""
RESAMPLES = 2000

Verdict = tuple[float, float]
"""What an arrangement is ranked by, the first number first."""


def score_tables(rows: Sequence[PositionRow]) -> tuple[dict[str, Scores], dict[str, Scores]]:
    """Return the scores of each arrangement with labels, and without; the cost is the time of an answer."""
    groups: dict[str, list[PositionRow]] = {}
    for row in rows:
        if row.gold_position is not None:
            groups.setdefault(row.condition, []).append(row)
    seconds = {name: mean([row.seconds for row in group]) for name, group in groups.items()}
    answers = {
        name: {question: [row.answer for row in asked] for question, asked in rows_by_question(group).items()}
        for name, group in groups.items()
    }
    usual = usual_answers(answers[BASELINE])
    costs = {name: seconds[name] / seconds[BASELINE] for name in groups}
    with_labels = {name: scores_with_labels(rows_by_question(group), costs[name]) for name, group in groups.items()}
    without_labels = {
        name: scores_without_labels(
            texts, usual, cost=costs[name],
            well_formed=[mean([float(is_sound(answer)) for answer in asked]) for asked in texts.values()],
        )
        for name, texts in answers.items()
    }  # fmt: skip
    return with_labels, without_labels


def compare(rows: Sequence[PositionRow], default: str = DEFAULT) -> dict[str, Any]:
    """Return both verdicts on the questions of the rows: rank correlations, choices, and what the choices reach."""
    with_labels, without_labels = score_tables(rows)
    default = default if default in with_labels else BASELINE
    labelled, label_free = (_verdicts(table) for table in (with_labels, without_labels))
    stable = [name for name, verdict in label_free.items() if verdict[0] == 1]
    choice_with, choice_without = (
        choose(table, default=default, labels=labels, order_matters=changes(without_labels[BASELINE]))
        for table, labels in ((with_labels, True), (without_labels, False))
    )
    best, chosen = choice_with.best, choice_without.name
    nearest = max(label_free, key=lambda name: label_free[name])
    return {
        "questions": len(with_labels[BASELINE].values),
        "correlation": rank_correlation(labelled, label_free, labelled),
        "correlation_of_stable": rank_correlation(labelled, label_free, stable),
        "stable": len(stable),
        "stable_worst": mean([labelled[name][0] for name in stable]) if stable else None,
        "best_with_labels": best,
        "chosen_with_labels": choice_with.name,
        "chosen_without_labels": chosen,
        "nearest_to_none": nearest,
        "chosen_minus_best": _difference(with_labels, chosen, best),
        "chosen_minus_none": _difference(with_labels, chosen, BASELINE),
        "nearest_minus_none": _difference(with_labels, nearest, BASELINE),
        "arrangements": {
            name: {"worst": worst, "mean": average, "stable": label_free[name][0], "agreement": label_free[name][1]}
            for name, (worst, average) in labelled.items()
        },
    }


def changes(stable: Scores) -> bool | None:
    """Return whether the position of the gold passage changes answers, from the scores without labels."""
    changed = [1 - values[0] for values in stable.values]
    interval = difference_interval(changed, resamples=RESAMPLES)
    return order_matters({"p": randomisation_p(changed), "difference_interval": interval, "n": len(changed)})


def unseen(rows: Sequence[PositionRow], default: str = DEFAULT) -> dict[str, Any]:
    """Return what ``auto`` gives on unseen questions: six times, five sixths choose and the others are answered.

    The questions that choose also say which position is the worst and the best of each arrangement. ``oracle`` is the
    best arrangement on all questions; ``only_better`` is ``none`` where ``auto`` is not better beyond noise.
    """
    with_labels, without_labels = score_tables(rows)
    default = default if default in with_labels else BASELINE
    chosen, better = Counter[str](), 0
    oracle = choose(with_labels, default=default, labels=True, order_matters=None).best
    questions = range(len(with_labels[BASELINE].values))
    values: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        choosing, held_out = [question for question in questions if question % FOLDS != fold], questions[fold::FOLDS]
        choice = choose(
            {name: _some(scores, choosing) for name, scores in with_labels.items()}, default=default, labels=True,
            order_matters=changes(_some(without_labels[BASELINE], choosing)),
        )  # fmt: skip
        chosen[choice.name] += 1
        better += choice.is_better
        only_better = choice.name if choice.is_better else BASELINE
        names = {
            "auto": choice.name,
            "only_better": only_better,
            "none": BASELINE,
            "default": default,
            "oracle": oracle,
        }
        for title, name in names.items():
            for column, numbers in _on_unseen(with_labels[name], choosing, held_out).items():
                values.setdefault(f"{title}_{column}", []).extend(numbers)
    pairs = {name: f"auto_{'mean' if name == 'none_mean' else 'worst'}" for name in COMPARED}
    return {
        "questions": len(questions),
        "chosen": dict(chosen.most_common()),
        "better": better,
        "oracle": oracle,
        "accuracy": {name: mean(numbers) for name, numbers in values.items()},
        "auto_minus": {name: _paired(values[auto], values[name]) for name, auto in pairs.items()},
    }


def _some(scores: Scores, questions: Sequence[int]) -> Scores:
    """Return the scores of some questions."""
    return Scores(
        values=[scores.values[question] for question in questions],
        second=[scores.second[question] for question in questions],
        cost=scores.cost,
        well_formed=[scores.well_formed[question] for question in questions],
    )


def _on_unseen(scores: Scores, choosing: Sequence[int], held_out: Sequence[int]) -> dict[str, list[float]]:
    """Return the accuracy of each unseen question at the worst position, on average, and at the best position."""
    best = max(range(len(scores.values[0])), key=lambda column: mean(scores.at(column, choosing)))
    return {
        "worst": scores.at(scores.worst(choosing), held_out),
        "mean": [scores.second[question] for question in held_out],
        "best": scores.at(best, held_out),
    }


def _verdicts(table: Mapping[str, Scores]) -> dict[str, Verdict]:
    """Return what ``measure`` ranks each arrangement by, rounded as there."""
    return {name: (round(m["worst"], 9), round(m["second"], 9)) for name, m in measured(table).items()}


def rank_correlation(
    first: Mapping[str, Verdict], second: Mapping[str, Verdict], names: Collection[str]
) -> dict[str, float] | None:
    """Return Spearman's rank correlation of two verdicts over arrangements, and its p by permutation.

    None for fewer than three arrangements, and where a verdict ranks all of them equal.
    """
    from scipy.stats import permutation_test, spearmanr

    columns = []
    for verdicts in (first, second):
        order = sorted({verdicts[name] for name in names})
        columns.append([order.index(verdicts[name]) for name in names])
    if len(names) < LEAST or any(len(set(column)) == 1 for column in columns):
        return None
    test = permutation_test(
        (columns[0],), lambda ranks: spearmanr(ranks, columns[1]).statistic, permutation_type="pairings",
        n_resamples=RESAMPLES, random_state=0,
    )  # fmt: skip
    return {"spearman": float(test.statistic), "p": float(test.pvalue), "n": len(names)}


def _difference(table: Mapping[str, Scores], name: str, other: str) -> dict[str, Any]:
    """Return the accuracy of an arrangement at its worst position minus that of another, paired by question."""
    questions = range(len(table[name].values))
    first, second = (scores.at(scores.worst(questions), questions) for scores in (table[name], table[other]))
    return _paired(first, second)


def _paired(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return {"accuracy": mean(differences), "ci95": list(difference_interval(differences, resamples=RESAMPLES))}


def answered_alone(rows: Sequence[PositionRow]) -> list[PositionRow]:
    """Return the rows of the questions that the model answers correctly from the gold passage alone."""
    kept = {row.question for row in rows if row.condition == GOLD_ONLY and row.accuracy == 1}
    return [row for row in rows if row.question in kept]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the record; ``answered alone`` of a record without such questions is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("records", nargs="*", help="NAME=RECORD", default=[f"{n}={r}" for n, r in RECORDS.items()])
    options = parser.parse_args(arguments)
    names = dict(text.split("=", 1) for text in options.records)
    summary: dict[str, Any] = {}
    for name, record in names.items():
        experiment = read_record(RESULTS / f"{record}.json")
        rows = [position_row(row) for row in experiment.rows]
        alone = answered_alone(rows)
        default = LARGE_DEFAULTS.get(str(experiment.head["model"]).removesuffix(".gguf"), DEFAULT)
        summary[name] = {
            ALL: compare(rows, default),
            ANSWERED_ALONE: compare(alone, default) if alone else None,
            UNSEEN: unseen(rows, default),
        }
    save_record(options.out, {"kind": "verdicts", "records": names, "summary": summary})


if __name__ == "__main__":
    main()
