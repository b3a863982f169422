"""Rows of the tables of studies: the service and its device, small decoders, and fine-tuned models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

Head = Mapping[str, Any]
Row = list[str]

FAULT_COLUMNS = {
    "requests": "requests",
    "failed": "failed",
    "wrong": "wrong",
    "undocumented": "undocumented status",
    "lost": "lost",
    "added_ms": "added, ms",
    "worst_ms": "longest, ms",
    "recovered_s": "recovered after, s",
    "served": "deleted and served",
    "mib_before": "memory before, MiB",
    "mib_most": "at most",
    "mib_after": "after",
    "live_worst_ms": "longest `/livez`, ms",
}


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def short(text: str) -> str:
    """Return a number without the zero before its point: .681."""
    return re.sub(r"(?<!\d)0\.", ".", text)


def first_answer(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per user: minutes to the first answer, and the seconds of every step."""
    yield ["user", "minutes", "steps, seconds"]
    for user, times in heads[0]["summary"].items():
        steps = ", ".join(f"`{name}` {seconds:.0f}" for name, seconds in times["seconds"].items())
        yield [user, f"{times['minutes']:.1f}", steps]


def against_default(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method of every data set: the default's accuracy minus its own, by data set and over all."""
    names = list(heads[0]["records"])
    yield ["default minus", *names, "all", "questions", "log-probability, all"]
    for method, by_set in heads[0]["summary"].items():
        if not set(names) <= by_set.keys():
            continue
        (low, high), likelihood = by_set["all"]["ci95"], by_set["all"]["log_probability"]
        yield [
            f"`{method}`",
            *(f"{by_set[name]['accuracy']:+.2f}" for name in names),
            f"{by_set['all']['accuracy']:+.3f} [{low:+.3f}, {high:+.3f}]",
            str(by_set["all"]["n"]),
            "-" if likelihood is None else f"{likelihood:+.2f}",
        ]


def engines(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per record: how many times sooner the judged answers are than those of the plain prompt."""
    yield [
        "documents x tokens", "questions", "first token, cold", "first token, warm", "questions per second",
        "last fifty against the second fifty", "tokens from the prefix cache: plain, judged",
    ]  # fmt: skip
    for head in heads:
        settings, summary = head["settings"], head["summary"]
        ratios, blocks = summary["ratios"], summary["judged"]["questions_per_s_by_ten"]
        decay = fmean(blocks[-5:]) / fmean(blocks[5:10]) - 1 if len(blocks) >= 15 else None
        yield [
            f"{settings['documents']} x {settings['tokens']}", str(settings["questions"]),
            *(short(f"{ratios[key]:.2f}") for key in ("first_token_cold", "first_token_warm", "questions_per_s")),
            "-" if decay is None else f"{decay:+.1%}".replace("%", " %"),
            ", ".join(percent(summary[way]["cached_share"]) for way in ("plain", "judged")),
        ]  # fmt: skip


def engines_changed(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per way of asking: questions with more than one answer over several orders, and over one order."""
    settings = heads[0]["settings"]
    yield ["", "questions", "orders", "more than one answer", "the same order again"]
    for way, changed in heads[0]["summary"]["changed"].items():
        yield [way, str(settings["ordered"]), str(settings["orders"]), *map(str, changed.values())]


UNPATCHED = {
    "hook": "with the hook",
    "batch": "without it, rows in one batch",
    "one by one": "without it, rows one after another",
    "batch, stored": "rows in one batch, passages in the store",
    "one by one, stored": "rows one after another, passages in the store",
}


def unpatched(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per way of reading: first token and tokens per second as multiples of the stock model's."""
    yield ["`default`", "first token", "tokens per second"]
    for name, text in UNPATCHED.items():
        yield [text, *(short(f"{ratio:.2f}") for ratio in heads[0]["summary"]["ratios"][name].values())]


def service_load(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per load: its limit and its measurement."""
    summary = heads[0]["summary"]
    cached, rerank, streams, added = (summary[load] for load in ("cached", "rerank", "streams", "added"))
    yield ["load", "limit", "measured"]
    yield [
        f"cached answers, {cached['rate']:.0f} requests/s, {cached['requests']} requests",
        "p50 < 5 ms, p99 < 25 ms",
        f"p50 {cached['p50_ms']:.1f} ms, p99 {cached['p99_ms']:.1f} ms",
    ]
    yield [
        f"rerank of 20 short documents by embedding, {rerank['requests']} requests",
        "p50 < 150 ms",
        f"p50 {rerank['p50_ms']:.0f} ms, p99 {rerank['p99_ms']:.0f} ms",
    ]
    yield [f"{streams['streams']} streams at the same time", "all complete", f"{streams['complete']} complete"]
    yield ["time that HTTP adds to an answer of the engine", "< 5 %", f"{added['added_percent']:+.1f} %"]


def faults(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per fault: requests; failed, wrong, lost and deleted answers; and the cost, each if a row has it."""
    rows = heads[0]["summary"]
    columns = {name: title for name, title in FAULT_COLUMNS.items() if any(name in row for row in rows.values())}
    yield ["fault", *columns.values()]
    yield from ([name, *(_cell(row.get(c)) for c in columns)] for name, row in rows.items() if row.keys() & columns)


def _cell(value: Any) -> str:
    return "-" if value is None else str(len(value)) if isinstance(value, list) else str(value)


def capacity_check(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per size of the memory for passages: hit share and rate, as planned and as measured."""
    yield ["passages in memory", "hit share, planned", "measured", "questions/s, planned", "measured", "ratio"]
    for fit, row in heads[0]["summary"]["check"]["rooms"].items():
        planned, rate = row["predicted_rate"], row["measured_rate"]
        shares = (percent(row["predicted_share"]), percent(row["measured_share"]))
        yield [f"{fit} of 16", *shares, f"{planned:.3f}", f"{rate:.3f}", f"{rate / planned:.2f}"]


def capacity_plan(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per decoder and GPU: memory for passages, where they come from, and replicas."""
    yield [
        "model, GPU", "passages on the GPU", "found there", "from Redis", "prefill", "step", "answer at 100/s",
        "replicas at 1, 100, 1,000/s", "from Redis, Gbit/s",
    ]  # fmt: skip
    for name, row in heads[0]["summary"]["plan"].items():
        yield [
            name, f"{row['passages_on_gpu']:,}", percent(row["share_on_gpu"]), percent(row["share_from_redis"]),
            f"{row['prefill_ms']:.1f} ms", f"{row['step_ms']:.1f} ms", f"{row['answer_s']:.1f} s",
            ", ".join(map(str, row["replicas"])),
            ", ".join(f"{float(f'{rate:.2g}'):g}" for rate in row["redis_gbit_s"]),
        ]  # fmt: skip


def capacity_parts(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per part of the fleet without GPUs: its size at each share of cached answers."""
    summary = heads[0]["summary"]["fleet"]
    yield ["part", *(name.replace("%", " %") for name in summary)]
    names = {
        "index_gb": "index, GB on each machine", "search_cores": "search, cores", "http_cores": "HTTP, cores",
        "answers_gb": "answers in Redis, GB", "all_passages_tb": "keys and values of all passages, TB",
    }  # fmt: skip
    for name, title in names.items():
        yield [title, *(f"{row[name]:.1f}" for row in summary.values())]


def capacity_fleet(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per share of cached answers and way to spread requests: what 50 GPUs do, and GPUs for 1,000/s."""
    yield ["answer cache", "requests", "different passages on GPUs", "found there", "50 GPUs", "GPUs for 1,000/s"]
    for answered, row in heads[0]["summary"]["fleet"].items():
        for name, title in (("routed", "routed by passage"), ("alone", "spread at random")):
            cells = (row[f"{name}_passages"], percent(row[f"{name}_share"]), row[f"{name}_rate_of_all"])
            kept, share, rate = f"{cells[0]:,}", cells[1], f"{cells[2]:,.0f}/s"
            yield [answered.replace("%", " %"), title, kept, share, rate, str(row[f"{name}_gpus"])]


def ray_routing(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per router of Ray Serve: the share of the prompts that came from the store, and ratios."""
    yield ["router", "tokens from the passage KV store", "p50 / round robin", "throughput / round robin"]
    for name, row in heads[0]["summary"]["routers"].items():
        ratios = [f"{row[key]:.2f}" for key in ("p50_ratio", "throughput_ratio")]
        yield [name, percent(row["hit_rate"]), *ratios]


def clients(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield one row for each client and route: whether it works, whole and streamed."""
    yield ["client", "route", "whole", "streamed"]
    for head in heads:
        versions = head["summary"]["clients"]
        for cell in head["summary"]["cells"]:
            name = cell["client"]
            client = f"`{name}` {versions[name]}" if name in versions else name
            yield [client, f"`{cell['route']}`", *(cell[form].replace("|", "\\|") for form in ("whole", "streamed"))]


def device_calls(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row for the stock model and each method: calls, how many times the stock model's, and waits."""
    methods = heads[0]["summary"]["methods"]
    yield ["method", *(f"{phase}: {text}" for phase in ("prompt", "token") for text in ("calls", "reads + uploads"))]
    for name, counts in methods.items():
        cells = ["the stock model" if name == "stock" else f"`{name}`"]
        for phase in ("prompt", "step"):
            ratio = counts[phase]["calls"] / methods["stock"][phase]["calls"]
            reads = f"{counts[phase]['reads']} + {counts[phase]['uploads']}"
            cells += [f"{counts[phase]['calls']:,} ({ratio:.1f}x)", reads]
        yield cells


def equal_under_load(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per record, method and load: answers and log-probabilities that are not those of one at a time."""
    yield ["dtype", "batch-invariant", "method", "connections", "different answers", "different log-probabilities"]
    for head in heads:
        settings = head["settings"]
        for row in head["summary"]["rows"]:
            shares = [f"{row[key]} of {row['questions']}" for key in ("different_answers", "different_scores")]
            method, together = f"`{row['method']}`", str(row["together"])
            yield [settings["dtype"], f"`{settings['batch_invariant']}`", method, together, *shares]


def laboratory(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per encoding: each split of every seed, and the steps."""
    summary = heads[0]["summary"]
    yield ["encoding", *(f"{split}: {text}" for split, text in summary["splits"].items()), "steps"]
    for name, encoding in summary["encodings"].items():
        digits = 2 if summary["metric"] == "perplexity" else 1
        cells = [_each(encoding["splits"][split], digits) for split in summary["splits"]]
        yield [f"`{name}`", *cells, ", ".join(str(steps) for steps in encoding["steps"])]


def by_place(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per encoding and split: the error at the first position, the mean between, and at the last."""
    yield ["encoding", "split", "first", "between", "last"]
    summary = heads[0]["summary"]
    for name, encoding in summary["encodings"].items():
        for split, text in summary["splits"].items():
            first, *between, last = encoding["splits"][split]["by_place"]
            # Of each seed the mean over positions.
            middle = {"values": [fmean(seed) for seed in zip(*(errors["values"] for errors in between), strict=True)]}
            yield [f"`{name}`", text, *(_each(errors, 0) for errors in (first, middle, last))]


def contextual_maps(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per decoder and kind of word: the best counter, its gates, and their difference."""
    yield ["encoding", "people", "counts", "layer, head", "queries", "gate", "largest other gate", "difference"]
    for head in heads:
        for name, counter in head["summary"]["counters"].items():
            gates = (f"{counter[key]:.2f}" for key in ("gate", "largest_other_gate", "difference"))
            where = f"{counter['layer']}, {counter['head']}"
            yield [f"`{head['encoding']}`", str(head["settings"]["people"]), name, where, counter["query"], *gates]


def _each(errors: Mapping[str, Any], digits: int) -> str:
    """Return the value of each seed, in one order for all: a mean would hide that one seed fails."""
    return ", ".join(f"{value:.{digits}f}" for value in errors["values"])


def fine_tuning(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per model, task and method: the curve by position, its worst, spread and mean, and gold only."""
    models = heads[0]["summary"]["models"]
    yield ["task", "method", "model", "first", "middle", "last", "worst", "spread", "mean", "gold only"]
    for task in next(iter(models.values())):
        for method in [name for name in models["before"][task] if name != "gold_only"]:
            for model, tasks in models.items():
                if method in tasks[task]:
                    yield [task.replace("_", "-"), f"`{method}`", model, *_curve(tasks[task], method)]


def _curve(task: Mapping[str, Any], method: str) -> Row:
    scores = [position["log_probability"] for position in task[method].values()]
    accuracy = [position["accuracy"] for position in task[method].values()]
    alone = task["gold_only"]
    if len(set(scores)) == 1:  # the answers do not depend on the position
        scores, accuracy = scores[:1], accuracy[:1]
    pairs = [
        *zip(scores, accuracy, strict=True),
        (min(scores), min(accuracy)),
        (max(scores) - min(scores), max(accuracy) - min(accuracy)),
        (sum(scores) / len(scores), sum(accuracy) / len(accuracy)),
        (alone["log_probability"], alone["accuracy"]),
    ]
    cells = [f"{score:.2f} ({share:.2f})" for score, share in pairs]
    return [*cells[: len(scores)], *[""] * (3 - len(scores)), *cells[len(scores) :]]


def fine_tuning_gains(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per task, method and trained model: its gain by position, worst position and spread."""
    gains = heads[0]["summary"]["gains"]
    yield ["task", "method", "model", "first", "middle", "last", "worst", "spread"]
    for task in next(iter(gains.values())):
        for method in dict.fromkeys(name for tasks in gains.values() for name in tasks[task]):
            for model, tasks in gains.items():
                if method in tasks[task]:
                    *positions, worst, spread = map(_gain_cell, tasks[task][method].values())
                    same = len(set(positions)) == 1
                    cells = ["", "", "", worst, "-"] if same else [*positions, worst, spread]
                    yield [task.replace("_", "-"), f"`{method}`", model, *cells]


def _gain_cell(gain: Head) -> str:
    return f"{gain['mean']:+.2f} [{gain['ci95'][0]:+.2f}, {gain['ci95'][1]:+.2f}]"


def forgetting(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per model: its training, and the perplexity of unrelated texts."""
    summary = heads[0]["summary"]
    yield ["model", "minutes of training", "best step", "perplexity", "log-probability less before"]
    for name, texts in summary["perplexity"].items():
        run, cells, difference = summary["trainings"].get(name), ["-", "-"], "-"
        if run is not None:
            low, high = texts["difference_ci95"]
            cells = [f"{run['seconds'] / 60:.0f}", f"{run['best_step']} of {run['steps']}"]
            difference = f"{texts['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
        yield [name, *cells, f"{texts['perplexity']:.2f}", difference]


def conversation_ranks(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per query of a follow-up: mean reciprocal rank and hit@5 of the gold passage by retriever."""
    first = heads[0]["summary"]["queries"]
    yield ["query", *(f"{retriever}: reciprocal rank, hit@5" for retriever in first["last"])]
    for kind, scores in first.items():
        yield [f"`{kind}`" if kind != "joined" else "joined, no weights", *map(_rank_cell, scores.values())]
    for head in heads[1:]:
        model = head["settings"]["model"]
        yield [f"`rewrite` by {model}", *map(_rank_cell, head["summary"]["queries"]["rewrite"].values())]


def _rank_cell(score: Head) -> str:
    return short(f"{score['reciprocal_rank']:.3f}, {score['hit@5']:.2f}")


def conversation_weights(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per half: the weight that it chooses, and reciprocal ranks on the other half."""
    halves = heads[0]["summary"]["chosen_on_half"]
    kinds = {"chosen": "chosen weight", "history": short(f"weight {heads[0]['summary']['default_weight']:.1f}")}
    kinds |= {"joined": "joined", "last": "last"}
    yield ["chosen on half", "weight", "retriever", *(f"{title}, other half" for title in kinds.values())]
    for half, result in halves.items():
        for retriever in (key for key in result if key != "weight"):
            cells = (short(f"{result[retriever][kind]:.3f}") for kind in kinds)
            yield ["AB"[int(half)], short(f"{result['weight']:.1f}"), retriever, *cells]


def conversation_answers(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per reader, method and condition: accuracy, and what the default condition adds to it."""
    yield [
        "reader",
        "method",
        "condition",
        "accuracy",
        "gold among the passages",
        "cached tokens",
        "default - this, p",
    ]
    for head in heads:
        settings, summary = head["settings"], head["summary"]
        for name, result in summary["conditions"].items():
            low, high = result["ci95"]
            versus = f"{result['default_minus_this']:+.2f} [{low:+.2f}, {high:+.2f}], {result['mcnemar_p']:.2f}"
            yield [
                settings["model"],
                f"`{summary['mitigation']}`",
                f"`{name}`" if "," not in name else "`history`, history first",
                short(f"{result['accuracy']:.2f}"),
                percent(result["has_gold"]),
                percent(result["cached_share"]),
                "-" if name == "history" else versus,
            ]


def conversation_cache(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method, layout, user and turn: cached tokens, bytes of the store, and times to first tokens."""
    times = ("first_token_seconds", "again_seconds", "single_question_seconds")
    yield [
        "method", "layout", "user", "turn", "prompt tokens", "cached", "store, MB", "first token, s", "asked again",
        "without history",
    ]  # fmt: skip
    for head in heads:
        for turn in head["summary"]["turns"]:
            yield [
                f"`{head['summary']['mitigation']}`", turn["layout"], "ABC"[turn["user"]], str(turn["turn"]),
                str(turn["prompt_tokens"]), str(turn["cached_tokens"]), f"{turn['store_bytes'] / 1e6:.1f}",
                *(short(f"{turn[key]:.2f}") if key in turn else "-" for key in times),
            ]  # fmt: skip


def end_to_end(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per measure of the end-to-end gate, a column per arrangement; several records as "before, after"."""
    names = list(heads[-1]["summary"])
    yield ["", *(f"`{name}`" for name in names)]
    counts = {"right passage among the first five": ("retrieved", "questions"),
              "right passage retrieved, not read": ("lost", "retrieved"),
              "right answers": ("right", "questions"),
              "off-topic questions answered as grounded": ("off_topic_answered", "off_topic")}  # fmt: skip
    for text, (count, of) in counts.items():
        yield [text, *(_each_record(heads, name, partial(_share, count=count, of=of)) for name in names)]
    yield ["citations of a right passage", *(_each_record(heads, name, _precision) for name in names)]
    yield ["passages that the filter leaves out", *(_each_record(heads, name, _leaked) for name in names)]


def _share(measured: Mapping[str, Any], count: str, of: str) -> str:
    return f"{measured[count]} of {measured[of]}" if measured[of] else ""


def _leaked(measured: Mapping[str, Any]) -> str:
    return str(measured["leaked"])


def _precision(measured: Mapping[str, Any]) -> str:
    precision = measured["citation_precision"]
    return "" if precision is None else short(f"{precision:.2f}")


def _each_record(heads: Sequence[Head], name: str, show: Callable[[Mapping[str, Any]], str]) -> str:
    """Return what is shown of an arrangement in each record; once if all are equal."""
    return ", ".join(dict.fromkeys(filter(None, (show(head["summary"][name]) for head in heads))))


STUDY_LAYOUTS: dict[str, Callable[[Sequence[Head]], Iterator[Row]]] = {
    "conversation-ranks": conversation_ranks,
    "conversation-weights": conversation_weights,
    "conversation-answers": conversation_answers,
    "conversation-cache": conversation_cache,
    "end-to-end": end_to_end,
    "against-default": against_default,
    "clients": clients,
    "first-answer": first_answer,
    "service-load": service_load,
    "engines": engines,
    "engines-changed": engines_changed,
    "unpatched": unpatched,
    "service-faults": faults,
    "fleet": faults,
    "service-attacks": faults,
    "capacity": capacity_check,
    "capacity-plan": capacity_plan,
    "capacity-fleet": capacity_fleet,
    "capacity-parts": capacity_parts,
    "ray-routing": ray_routing,
    "device-calls": device_calls,
    "equal-under-load": equal_under_load,
    "lab": laboratory,
    "by-place": by_place,
    "lab-maps": contextual_maps,
    "fine-tuning": fine_tuning,
    "gains": fine_tuning_gains,
    "forgetting": forgetting,
}
"""By name, as in ``benchmarks.tables.LAYOUTS``."""
