"""Training against position bias, measured: ``python -m benchmarks.fine_tuning LITM ORACLE TEXTS --out DIR``.

Makes training data, trains with each objective, and evaluates the model before and after on questions that were not
trained on. Every step is a command of rag-posfix, which continues after an interruption. At the end a record with the
curves of all models is written.

LITM are questions of Lost in the Middle with 20 documents. The first 160 are trained on with their own distractors,
the rest are evaluated. ORACLE are questions of Natural Questions with gold passages. The first 220 are those of LITM,
so they are left out. TEXTS is the corpus of a BEIR data set that is unrelated to both.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rag_posfix.evaluation.record import environment, read_head, read_record, write_record
from rag_posfix.evaluation.statistics import bootstrap_interval

Answers = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Log-probability by method, place and question."""

OBJECTIVES = ("in2", "block", "distill")
EVALUATED = {
    "before": "none,parallel_windows,parallel_encoding,sorted_inter_document",
    "block": "none,parallel_windows,parallel_encoding,sorted_inter_document",
    "in2": "none,parallel_windows",
    "distill": "none,parallel_windows",
}
MAX_TEXTS = 100
TRAINED, SHARED = 160, 220
"""Rows of LITM that are trained on, and rows of ORACLE that are in LITM."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.fine_tuning", description=__doc__.splitlines()[0])
    parser.add_argument("litm", type=Path, help="Lost in the Middle with 20 documents")
    parser.add_argument("oracle", type=Path, help="Natural Questions with gold passages")
    parser.add_argument("texts", type=Path, help="corpus.jsonl.gz of a BEIR data set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--questions", type=int, default=40, help="for the evaluation")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args(arguments)
    made = given.out / "samples"
    make_data(given, made)
    tuned = {name: train(name, given, made) for name in OBJECTIVES}
    models: dict[str, Path | None] = {"before": None, **tuned}
    data = {"litm": given.out / "unseen.jsonl", "key_value": given.out / "key-value" / "samples.jsonl"}
    found = {
        name: {task: evaluate(given, name, adapter, task, path) for task, path in data.items()}
        for name, adapter in models.items()
    }
    forgotten = perplexity(given, tuned)
    head = {
        "kind": "fine-tuning", **environment(), "model": given.model,
        "settings": {"samples": given.samples, "questions": given.questions, "commands": "benchmarks/fine_tuning.py"},
        "summary": {
            "models": {name: shown(tasks) for name, tasks in found.items()},
            "gains": {name: gained(found["before"], found[name]) for name in OBJECTIVES},
            "perplexity": forgotten,
            "trainings": {name: training(given.out / name) for name in OBJECTIVES},
        },
    }  # fmt: skip
    print(write_record(given.out, "fine-tuning", head))


def command(*words: object) -> None:
    """Run a command of rag-posfix; its output goes to ours."""
    print("rag-posfix", *words, flush=True)
    subprocess.run([Path(sys.executable).with_name("rag-posfix"), *map(str, words)], check=True)


def make_data(given: argparse.Namespace, made: Path) -> None:
    """Make the samples to train on, and those of key-value retrieval to evaluate on."""
    near, far, unseen = (given.out / f"{name}.jsonl" for name in ("near", "far", "unseen"))
    copy_rows(given.litm, near, 0, TRAINED)
    copy_rows(given.litm, unseen, TRAINED, None)
    copy_rows(given.oracle, far, SHARED, None)
    command(
        "train", "data", "--pairs", near, "--pairs", far, "--own-distractors", "--templates", "key_value",
        "--multi", 0, "--against", unseen, "--samples", given.samples, "--min-tokens", 150, "--max-tokens", 450,
        "--model", given.model, "--out", made,
    )  # fmt: skip
    command(
        "train", "data", "--templates", "key_value", "--multi", 0, "--seed", 1, "--samples", given.questions,
        "--min-tokens", 450, "--max-tokens", 500, "--length-bins", 1, "--model", given.model,
        "--out", given.out / "key-value",
    )  # fmt: skip


def copy_rows(source: Path, target: Path, start: int, stop: int | None) -> None:
    """Write rows of a compressed file to another one."""
    with gzip.open(source, "rt", encoding="utf-8") as opened:
        rows = list(opened)[start:stop]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(rows), "utf-8")


def train(objective: str, given: argparse.Namespace, made: Path) -> Path:
    """Train with an objective; return the folder of the adapter."""
    held_out, batch = 16, 4
    command(
        "-v", "train", objective, "--data", made / "samples.jsonl", "--batch", batch, "--held-out", held_out,
        "--steps", (given.samples - held_out) // batch, "--evaluate-every", 38, "--learning-rate", 2e-4,
        "--model", given.model, "--out", given.out / objective,
    )  # fmt: skip
    return Path(given.out, objective, "adapter")


def evaluate(given: argparse.Namespace, name: str, adapter: Path | None, task: str, data: Path) -> Path:
    """Return the head of the record of a position experiment with a model."""
    documents, places = (10, "0,4,9") if task == "litm" else (16, "0,7,15")
    folder = given.out / f"{task}-{name}"
    command(
        "eval", "positions", "--data", data, "--documents", documents, "--gold-positions", places,
        "--limit", given.questions, "--mitigation", EVALUATED[name], "--max-tokens", 12,
        "--reuse", "--model", given.model, "--out", folder, *(() if adapter is None else ("--adapter", adapter)),
    )  # fmt: skip
    return last_record(folder, "positions")


def scores(rows: Sequence[Mapping[str, Any]]) -> Answers:
    """Return the log-probability of every question by method and place, without the runs that have no place."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["gold_position"] is not None:
            found[row["condition"]][str(row["gold_position"])][row["question"]] = row["log_probability"]
    return found


def gains(before: Answers, after: Answers) -> dict[str, Any]:
    """Return what a training adds by method: at each place, to the worst place, and to the spread over places.

    Each is the difference of means over questions with its 95 % interval, questions resampled whole.
    """
    return {method: _gains_of(before[method], after[method]) for method in after if method in before}


def _gains_of(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    places = list(before)
    n = len(places)
    questions = list(before[places[0]])
    rows = [[run[place][question] for run in (before, after) for place in places] for question in questions]
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    measures: dict[str, Callable[[Sequence[float]], float]] = {
        **{place: partial(_difference, at=at, n=n) for at, place in enumerate(places)},
        "worst": lambda one: min(one[n:]) - min(one[:n]),
        "spread": lambda one: max(one[n:]) - min(one[n:]) - max(one[:n]) + min(one[:n]),
    }
    return {
        name: {"mean": measure(means), "ci95": list(bootstrap_interval(rows, measure))}
        for name, measure in measures.items()
    }


def _difference(means: Sequence[float], at: int, n: int) -> float:
    return means[n + at] - means[at]


def perplexity(given: argparse.Namespace, tuned: Mapping[str, Path]) -> dict[str, Any]:
    """Return the perplexity of the texts under each model."""
    folder, texts = given.out / "forgetting", given.out / "texts"
    texts.mkdir(exist_ok=True)
    with gzip.open(given.texts, "rt", encoding="utf-8") as opened:
        for number, line in enumerate(islice(opened, MAX_TEXTS)):
            (texts / f"{number:03}.txt").write_text(json.loads(line)["text"], "utf-8")
    named = [word for one in tuned.values() for word in ("--tuned", one)]
    command("train", "forgetting", "--texts", texts, "--model", given.model, *named, "--out", folder)
    found = newest(folder, "perplexity")
    names = {str(path): name for name, path in tuned.items()}
    return {names.get(key, "before"): value for key, value in found.items()}


def training(folder: Path) -> dict[str, Any]:
    """Return the seconds, the steps and the best step of a training."""
    found = newest(folder, "train")
    return {key: found[key] for key in ("seconds", "steps", "best_step", "before", "after")}


def newest(folder: Path, kind: str) -> Mapping[str, Any]:
    summary: Mapping[str, Any] = read_head(last_record(folder, kind))["summary"]
    return summary


def last_record(folder: Path, kind: str) -> Path:
    return max(folder.glob(f"{kind}-*.json"))


def shown(records: Mapping[str, Path]) -> dict[str, Any]:
    """Return the curves of each method by place, by task."""
    found = {task: read_head(path)["summary"] for task, path in records.items()}
    return {
        task: {
            "gold_only": summary["gold_only"],
            **{name: method["positions"] for name, method in summary["mitigations"].items()},
        }
        for task, summary in found.items()
    }


def gained(before: Mapping[str, Path], after: Mapping[str, Path]) -> dict[str, Any]:
    """Return what a training adds, by task and method."""
    answers = {path: scores(read_record(path).rows) for path in (*before.values(), *after.values())}
    return {task: gains(answers[before[task]], answers[path]) for task, path in after.items()}


if __name__ == "__main__":
    main()
