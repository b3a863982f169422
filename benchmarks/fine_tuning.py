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
"""Log-probability by method, position and question."""

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
    chosen = parser.parse_args(arguments)
    samples = chosen.out / "samples"
    make_data(chosen, samples)
    tuned = {name: train(name, chosen, samples) for name in OBJECTIVES}
    models: dict[str, Path | None] = {"before": None, **tuned}
    data = {"litm": chosen.out / "unseen.jsonl", "key_value": chosen.out / "key-value" / "samples.jsonl"}
    records = {
        name: {task: evaluate(chosen, name, adapter, task, path) for task, path in data.items()}
        for name, adapter in models.items()
    }
    forgotten = perplexity(chosen, tuned)
    head = {
        "kind": "fine-tuning", **environment(), "model": chosen.model,
        "settings": {
            "samples": chosen.samples, "questions": chosen.questions, "commands": "benchmarks/fine_tuning.py",
        },
        "summary": {
            "models": {name: position_curves(tasks) for name, tasks in records.items()},
            "gains": {name: compute_gains(records["before"], records[name]) for name in OBJECTIVES},
            "perplexity": forgotten,
            "trainings": {name: training(chosen.out / name) for name in OBJECTIVES},
        },
    }  # fmt: skip
    print(write_record(chosen.out, "fine-tuning", head))


def command(*words: object) -> None:
    """Run a command of rag-posfix; its output goes to ours."""
    print("rag-posfix", *words, flush=True)
    subprocess.run([Path(sys.executable).with_name("rag-posfix"), *map(str, words)], check=True)


def make_data(chosen: argparse.Namespace, samples: Path) -> None:
    """Make the samples to train on, and those of key-value retrieval to evaluate on."""
    near, far, unseen = (chosen.out / f"{name}.jsonl" for name in ("near", "far", "unseen"))
    copy_rows(chosen.litm, near, 0, TRAINED)
    copy_rows(chosen.litm, unseen, TRAINED, None)
    copy_rows(chosen.oracle, far, SHARED, None)
    command(
        "train", "data", "--pairs", near, "--pairs", far, "--own-distractors", "--templates", "key_value",
        "--multi", 0, "--decontaminate", unseen, "--samples", chosen.samples, "--min-tokens", 150, "--max-tokens", 450,
        "--model", chosen.model, "--out", samples,
    )  # fmt: skip
    command(
        "train", "data", "--templates", "key_value", "--multi", 0, "--seed", 1, "--samples", chosen.questions,
        "--min-tokens", 450, "--max-tokens", 500, "--length-bins", 1, "--model", chosen.model,
        "--out", chosen.out / "key-value",
    )  # fmt: skip


def copy_rows(source: Path, target: Path, start: int, stop: int | None) -> None:
    """Write rows of a compressed file to another one."""
    with gzip.open(source, "rt", encoding="utf-8") as file:
        rows = list(file)[start:stop]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(rows), "utf-8")


def train(objective: str, chosen: argparse.Namespace, samples: Path) -> Path:
    """Train with an objective; return the folder of the adapter."""
    held_out, batch = 16, 4
    command(
        "-v", "train", objective, "--data", samples / "samples.jsonl", "--batch", batch, "--held-out", held_out,
        "--steps", (chosen.samples - held_out) // batch, "--evaluate-every", 38, "--learning-rate", 2e-4,
        "--model", chosen.model, "--out", chosen.out / objective,
    )  # fmt: skip
    return Path(chosen.out, objective, "adapter")


def evaluate(chosen: argparse.Namespace, name: str, adapter: Path | None, task: str, data: Path) -> Path:
    """Return the head of the record of a position experiment with a model."""
    documents, positions = (10, "0,4,9") if task == "litm" else (16, "0,7,15")
    folder = chosen.out / f"{task}-{name}"
    command(
        "eval", "positions", "--data", data, "--documents", documents, "--gold-positions", positions,
        "--limit", chosen.questions, "--mitigation", EVALUATED[name], "--max-tokens", 12,
        "--reuse", "--model", chosen.model, "--out", folder, *(() if adapter is None else ("--adapter", adapter)),
    )  # fmt: skip
    return last_record(folder, "positions")


def scores(rows: Sequence[Mapping[str, Any]]) -> Answers:
    """Return the log-probability of every question by method and position, without the runs that have no position."""
    answers: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["gold_position"] is not None:
            answers[row["condition"]][str(row["gold_position"])][row["question"]] = row["log_probability"]
    return answers


def gains(before: Answers, after: Answers) -> dict[str, Any]:
    """Return what a training adds by method: at each position, to the worst, and to the spread over positions.

    Each is the difference of means over questions with its 95 % interval, questions resampled whole.
    """
    return {method: _gains_of(before[method], after[method]) for method in after if method in before}


def _gains_of(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    positions = list(before)
    n = len(positions)
    questions = list(before[positions[0]])
    rows = [[run[position][question] for run in (before, after) for position in positions] for question in questions]
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    measures: dict[str, Callable[[Sequence[float]], float]] = {
        **{position: partial(_difference, index=index, n=n) for index, position in enumerate(positions)},
        "worst": lambda means: min(means[n:]) - min(means[:n]),
        "spread": lambda means: max(means[n:]) - min(means[n:]) - max(means[:n]) + min(means[:n]),
    }
    return {
        name: {"mean": measure(means), "ci95": list(bootstrap_interval(rows, measure))}
        for name, measure in measures.items()
    }


def _difference(means: Sequence[float], index: int, n: int) -> float:
    return means[n + index] - means[index]


def perplexity(chosen: argparse.Namespace, tuned: Mapping[str, Path]) -> dict[str, Any]:
    """Return the perplexity of the texts under each model."""
    folder, texts = chosen.out / "forgetting", chosen.out / "texts"
    texts.mkdir(exist_ok=True)
    with gzip.open(chosen.texts, "rt", encoding="utf-8") as file:
        for number, line in enumerate(islice(file, MAX_TEXTS)):
            (texts / f"{number:03}.txt").write_text(json.loads(line)["text"], "utf-8")
    named = [word for adapter in tuned.values() for word in ("--tuned", adapter)]
    command("train", "forgetting", "--texts", texts, "--model", chosen.model, *named, "--out", folder)
    perplexities = newest(folder, "perplexity")
    names = {str(path): name for name, path in tuned.items()}
    return {names.get(key, "before"): value for key, value in perplexities.items()}


def training(folder: Path) -> dict[str, Any]:
    """Return the seconds, the steps and the best step of a training."""
    summary = newest(folder, "train")
    return {key: summary[key] for key in ("seconds", "steps", "best_step", "before", "after")}


def newest(folder: Path, kind: str) -> Mapping[str, Any]:
    summary: Mapping[str, Any] = read_head(last_record(folder, kind))["summary"]
    return summary


def last_record(folder: Path, kind: str) -> Path:
    return max(folder.glob(f"{kind}-*.json"))


def position_curves(records: Mapping[str, Path]) -> dict[str, Any]:
    """Return the curves of each method by position, by task."""
    summaries = {task: read_head(path)["summary"] for task, path in records.items()}
    return {
        task: {
            "gold_only": summary["gold_only"],
            **{name: method["positions"] for name, method in summary["mitigations"].items()},
        }
        for task, summary in summaries.items()
    }


def compute_gains(before: Mapping[str, Path], after: Mapping[str, Path]) -> dict[str, Any]:
    """Return what a training adds, by task and method."""
    answers = {path: scores(read_record(path).rows) for path in (*before.values(), *after.values())}
    return {task: gains(answers[before[task]], answers[path]) for task, path in after.items()}


if __name__ == "__main__":
    main()
