"""Tables of what was trained: small decoders of the laboratory, and fine-tuned models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

Head = Mapping[str, Any]
Row = list[str]


def laboratory(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per encoding: mean of each split over the seeds, the lowest and the highest, and the steps."""
    summary = heads[0]["summary"]
    yield ["encoding", *(f"{split}: {text}" for split, text in summary["splits"].items()), "steps"]
    for name, found in summary["encodings"].items():
        digits = 2 if summary["metric"] == "perplexity" else 1
        cells = [_spread(found["splits"][split], digits) for split in summary["splits"]]
        yield [f"`{name}`", *cells, ", ".join(str(steps) for steps in found["steps"])]


def by_place(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per encoding and split: the error at the first place, the mean of those between, and at the last."""
    yield ["encoding", "split", "first", "between", "last"]
    summary = heads[0]["summary"]
    for name, found in summary["encodings"].items():
        for split, text in summary["splits"].items():
            first, *between, last = found["splits"][split]["by_place"]
            yield [f"`{name}`", text, *(_spread(one, 0) for one in (first, _mean_of(between), last))]


def _mean_of(places: Sequence[Head]) -> dict[str, Any]:
    """Return the spread over seeds of the mean over places."""
    values = [fmean(of_seed) for of_seed in zip(*(place["values"] for place in places), strict=True)]
    return {"mean": fmean(values), "low": min(values), "high": max(values), "values": values}


def contextual_maps(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per decoder and kind of word: the best counter, its gates, and their difference."""
    yield ["encoding", "people", "counts", "layer, head", "queries", "gate", "largest other gate", "difference"]
    for head in heads:
        for name, one in head["summary"]["counters"].items():
            gates = (f"{one[key]:.2f}" for key in ("gate", "largest_other_gate", "difference"))
            where = f"{one['layer']}, {one['head']}"
            yield [f"`{head['encoding']}`", str(head["settings"]["people"]), name, where, one["query"], *gates]


def _spread(found: Mapping[str, Any], digits: int) -> str:
    mean, low, high = (f"{found[name]:.{digits}f}" for name in ("mean", "low", "high"))
    return mean if len(found["values"]) == 1 else f"{mean} ({low} to {high})"


def fine_tuning(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per model, task and method: the curve by place, its worst place, spread and mean, and gold only."""
    models = heads[0]["summary"]["models"]
    yield ["task", "method", "model", "first", "middle", "last", "worst", "spread", "mean", "gold only"]
    for task in next(iter(models.values())):
        for method in [name for name in models["before"][task] if name != "gold_only"]:
            for model, found in models.items():
                if method in found[task]:
                    yield [task.replace("_", "-"), f"`{method}`", model, *_curve(found[task], method)]


def _curve(task: Mapping[str, Any], method: str) -> Row:
    found = list(task[method].values())
    scores = [one["log_probability"] for one in found]
    right = [one["accuracy"] for one in found]
    alone = task["gold_only"]
    if len(set(scores)) == 1:  # the answers do not depend on the place
        scores, right = scores[:1], right[:1]
    cells = [f"{score:.2f} ({share:.2f})" for score, share in zip(scores, right, strict=True)]
    whole = [
        f"{min(scores):.2f} ({min(right):.2f})",
        f"{max(scores) - min(scores):.2f} ({max(right) - min(right):.2f})",
        f"{sum(scores) / len(scores):.2f} ({sum(right) / len(right):.2f})",
        f"{alone['log_probability']:.2f} ({alone['accuracy']:.2f})",
    ]
    return [*cells, *[""] * (3 - len(cells)), *whole]


def fine_tuning_gains(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per task, method and trained model: what it adds by place, to the worst place and to the spread."""
    found = heads[0]["summary"]["gains"]
    yield ["task", "method", "model", "first", "middle", "last", "worst", "spread"]
    for task in next(iter(found.values())):
        for method in dict.fromkeys(name for one in found.values() for name in one[task]):
            for model, one in found.items():
                if method in one[task]:
                    yield [task.replace("_", "-"), f"`{method}`", model, *_gain_cells(one[task][method])]


def _gain_cells(measures: Mapping[str, Head]) -> Row:
    cells = {
        name: f"{one['mean']:+.2f} [{one['ci95'][0]:+.2f}, {one['ci95'][1]:+.2f}]" for name, one in measures.items()
    }
    *places, worst, spread = cells.values()
    return ["", "", "", worst, "-"] if len(set(places)) == 1 else [*places, worst, spread]


def forgetting(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per model: its training, and the perplexity of unrelated texts."""
    summary = heads[0]["summary"]
    yield ["model", "minutes of training", "best step", "perplexity", "log-probability less before"]
    for name, found in summary["perplexity"].items():
        run = summary["trainings"].get(name)
        trained = (
            ["-", "-"] if run is None else [f"{run['seconds'] / 60:.0f}", f"{run['best_step']} of {run['steps']}"]
        )
        low, high = found["difference_ci95"]
        difference = "-" if run is None else f"{found['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        yield [name, *trained, f"{found['perplexity']:.2f}", difference]


TRAINING_LAYOUTS = {
    "lab": laboratory,
    "by-place": by_place,
    "lab-maps": contextual_maps,
    "fine-tuning": fine_tuning,
    "gains": fine_tuning_gains,
    "forgetting": forgetting,
}
"""By name, as in ``benchmarks.tables.LAYOUTS``."""
