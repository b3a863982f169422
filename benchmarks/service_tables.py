"""Rows of the tables about the service and its device: first hour, clients, load, faults, queueing, routers, calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
}


def first_answer(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per user: minutes to the first answer, and the seconds of every step."""
    yield ["user", "minutes", "steps, seconds"]
    for user, found in heads[0]["summary"].items():
        steps = ", ".join(f"`{name}` {seconds:.0f}" for name, seconds in found["seconds"].items())
        yield [user, f"{found['minutes']:.1f}", steps]


def service_load(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per load: what was asked for, and what was measured."""
    summary = heads[0]["summary"]
    cached, rerank, streams, added = (summary[part] for part in ("cached", "rerank", "streams", "added"))
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
    yield [
        f"{streams['streams']} streams at the same time",
        "all complete",
        f"{streams['complete']} complete",
    ]
    yield ["time that HTTP adds to an answer of the engine", "< 5 %", f"{added['added_percent']:+.1f} %"]


def faults(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per fault: requests, what failed, was wrong or lost, and what it cost."""
    rows = heads[0]["summary"]
    yield ["fault", *FAULT_COLUMNS.values()]
    for name, found in rows.items():
        yield [name, *(_cell(found.get(column)) for column in FAULT_COLUMNS)]


def _cell(value: Any) -> str:
    return "-" if value is None else str(len(value)) if isinstance(value, list) else str(value)


def capacity_check(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per distribution of service times: mean seconds that the queueing formula predicts, and measured."""
    yield ["service times", "places busy", "predicted", "measured", "ratio"]
    for name, found in heads[0]["summary"]["check"].items():
        predicted, measured = found["predicted_response_s"], found["measured_response_s"]
        ratio = f"{found['measured_to_predicted']:.2f}"
        yield [name, f"{found['load']:.0%}".replace("%", " %"), f"{predicted:.3f} s", f"{measured:.3f} s", ratio]


def ray_routing(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per router of Ray Serve: the share of the prompts that came from the store, and ratios."""
    yield ["router", "tokens from the passage KV store", "p50 / round robin", "throughput / round robin"]
    for name, found in heads[0]["summary"]["routers"].items():
        ratios = [f"{found[key]:.2f}" for key in ("p50_ratio", "throughput_ratio")]
        yield [name, f"{found['hit_rate']:.0%}".replace("%", " %"), *ratios]


def clients(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield one row for each client and route: whether it works, whole and streamed."""
    yield ["client", "route", "whole", "streamed"]
    for head in heads:
        versions = head["summary"]["clients"]
        for cell in head["summary"]["cells"]:
            name = cell["client"]
            known = f"`{name}` {versions[name]}" if name in versions else name
            yield [known, f"`{cell['route']}`", *(cell[form].replace("|", "\\|") for form in ("whole", "streamed"))]


def device_calls(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row for the stock model and each method: calls, how many times the stock model's, and waits."""
    methods = heads[0]["summary"]["methods"]
    yield ["method", *(f"{part}: {text}" for part in ("prompt", "token") for text in ("calls", "reads + uploads"))]
    for name, counts in methods.items():
        cells = ["the stock model" if name == "stock" else f"`{name}`"]
        for part in ("prompt", "step"):
            ratio = counts[part]["calls"] / methods["stock"][part]["calls"]
            cells += [
                f"{counts[part]['calls']:,} ({ratio:.1f}x)",
                f"{counts[part]['reads']} + {counts[part]['uploads']}",
            ]
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
