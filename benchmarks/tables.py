"""Markdown tables of records: ``python -m benchmarks.tables RECORD... [as LAYOUT]``. ``make docs`` fills pages so.

A record carries its tables as text, or is of a kind that commands of the product write and has a layout here. Records
of one kind, one data set and one number of questions may be given together; of a method that several hold, the first
counts. Records that carry tables, and those of bench, have rows of their own.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.files import SHIPPED
from benchmarks.keep_record import experiment
from rag_posfix.assembly.tokenization import PROMPT_VERSION
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.answers.causes import CAUSES, MEAN, REMOVED, WORST
from rag_posfix.evaluation.record import read_head
from rag_posfix.mitigations import MITIGATIONS

Head = Mapping[str, Any]
Row = list[str]

DEFAULT = MethodSpec("context_experts", MITIGATIONS.presets("context_experts")["default"]).label
PROFILE = re.compile(r"profile=\[.*?\]")
HEADS = re.compile(r"heads=\[\[.*?\]\]")
MEASURES = ("nDCG@10", "R@10", "P@1")
CUTS = (1, 3)
WORK = ("seconds", "tokens read")
TIMES_FASTER = {
    "ttft_cold_ratio": "cold",
    "ttft_warm_memory_ratio": "warm, memory",
    "ttft_warm_disk_ratio": "warm, disk",
    "ttft_warm_redis_ratio": "warm, Redis",
}
PLAIN_RATIOS = {"decode_ratio": "decode", "together_ratio": "together", "memory_ratio": "peak memory"}


class Cells(string.Formatter):
    """Formats cells: ``~`` drops the zero before the point, a percent sign has a space before it, None is "-"."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "-"
        text = format(value, format_spec.removeprefix("~")).replace("%", " %")
        return short(text) if format_spec.startswith("~") else text


def filled(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table for a record to carry: titles, and a row per mapping, whose values fill each column's format."""
    cells = Cells()
    return {"columns": list(columns), "rows": [[cells.vformat(c, (), row) for c in columns.values()] for row in rows]}


def percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def short(text: str) -> str:
    """Return a number without the zero before its point: .681."""
    return re.sub(r"(?<!\d)0\.", ".", text)


def label(name: str) -> str:
    """Return a method's label as code, without the numbers of a measured profile or list of heads."""
    return f"`{HEADS.sub('heads=HEADS', PROFILE.sub('profile=PROFILE', name))}`"


def scores(log_probability: float | None, accuracy: float) -> str:
    """Return a log-probability and an accuracy: -3.21 (.20); the accuracy alone of a server that scores no answer."""
    if log_probability is None:
        return short(f"{accuracy:.2f}")
    return f"{log_probability:.2f} ({accuracy:.2f})".replace("(0.", "(.").replace("(1.00", "(1.0")


def methods_of(heads: Sequence[Head], key: str = "mitigations") -> dict[str, Any]:
    """Return what the records say of each method."""
    if any(conditions(head) != conditions(heads[0]) for head in heads):
        raise EvaluationError("records differ in kind, data, model or settings; give those of one experiment")
    return first_of(heads, key)


def first_of(heads: Sequence[Head], key: str) -> dict[str, Any]:
    """Return what the records say of each method; of a method that several hold, the first counts."""
    methods: dict[str, Any] = {}
    for head in heads:
        for name, summary in head["summary"][key].items():
            methods.setdefault(name, summary)
    return methods


def conditions(head: Head, *apart: str) -> dict[str, Any]:
    """Return what is equal in all records of a table: of positions all but the methods and what changes no answer."""
    of_kind = {"kind": head.get("kind"), "data": head.get("data"), "n": head["summary"].get("n")}
    if head.get("kind") != "positions":
        return of_kind
    return of_kind | experiment(head, ("mitigations", "reuse", "check_orders", "answers_of_earlier_runs_by", *apart))


def positions(heads: Sequence[Head], columns: Sequence[str]) -> Iterator[Row]:
    """Yield a row per method: log-probability and accuracy at each gold position, then the columns."""
    methods = methods_of(heads)
    gold = list(next(iter(methods.values()))["positions"])
    yield ["method", *(f"gold at {position}" for position in gold), *columns]
    for name, result in methods.items():
        cells = [
            scores(measured["log_probability"], measured["accuracy"]) for measured in result["positions"].values()
        ]
        if len(set(cells)) == 1 and result["answers_that_change"] == 0:
            cells = [cells[0], *["same"] * (len(cells) - 1)]
        yield [label(name), *cells, *(POSITION_COLUMNS[column](result) for column in columns)]


def worst_minus_best(result: Mapping[str, Any]) -> str:
    """Return a method's worst position minus the best of the unmodified model, with its interval."""
    if "versus_none" not in result:
        return "-"
    interval = result["versus_none"]["ci95"]
    if interval is None:  # of a server that scores no answer
        return "-"
    low, high = interval
    return f"{result['versus_none']['worst_minus_best_log_probability']:+.2f} [{low:+.2f}, {high:+.2f}]"


def accuracy_against_none(result: Mapping[str, Any]) -> str:
    """Return the accuracy at a method's worst position minus the best of the unmodified model, and McNemar's p."""
    if "versus_none" not in result:
        return "-"
    versus = result["versus_none"]
    return short(f"{versus['worst_minus_best_accuracy']:+.2f}, {versus['mcnemar_p']:.2f}")


POSITION_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "worst": lambda result: scores(result["worst_log_probability"], result["worst"]),
    "mean": lambda result: scores(result["mean_log_probability"], result["mean"]),
    "spread": lambda result: scores(result["spread_log_probability"], result["spread"]),
    "worst - best of `none`": worst_minus_best,
    "answers that change": lambda result: percent(result["answers_that_change"]),
    "accuracy: worst - best of `none`, p": accuracy_against_none,
    "scorer: recall@1, @3": lambda result: short(f"{result['recall_at_1']:.2f}, {result['recall_at_3']:.2f}"),
    "well-formed answers": lambda result: percent(result["sound"]),
}


def capture(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method: accuracy in each record at its worst position, and the share of planted answers."""
    if any(conditions(head, "hostile") != conditions(heads[0], "hostile") for head in heads):
        raise EvaluationError(
            "records differ in more than --hostile; give runs of the same questions with and without"
        )
    yield ["method", *(head["settings"].get("hostile", "no hostile passage") for head in heads)]
    for name in heads[0]["summary"]["mitigations"]:
        results = [head["summary"]["mitigations"][name] for head in heads]
        yield [
            label(name),
            *(
                scores(result["worst_log_probability"], result["worst"])
                + (f"; planted {percent(result['planted'])}" if result.get("planted") is not None else "")
                for result in results
            ),
        ]


def floor_and_ceiling(heads: Sequence[Head]) -> str:
    """Return the number of questions, and the scores with the gold passage alone and without passages."""
    summary = heads[0]["summary"]
    alone, none = (
        scores(summary[name]["log_probability"], summary[name]["accuracy"]) for name in ("gold_only", "closed_book")
    )
    text = f"{summary['n']} questions. The gold passage alone: {alone}; no passages: {none}."
    version = heads[0].get("prompt_version", 1)
    return (
        text if version == PROMPT_VERSION else f"{text} Prompts of version {version}; today's are of {PROMPT_VERSION}."
    )


def permutations(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method: answers that change with the order, and how good they are."""
    scored = "log-probability (accuracy), 95 % of the accuracy"
    yield ["method", "answers that change", "largest difference of logits", scored]
    for name, result in methods_of(heads).items():
        low, high = (short(f"{bound:.2f}") for bound in result["accuracy_ci95"])
        moved = result["max_logit_difference"]
        quality = f"{scores(result['log_probability'], result['accuracy'])} [{low}, {high}]"
        yield [label(name), percent(result["flip_rate"]), f"{moved:.2f}" if moved else "0", quality]


def demo(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method of the demo: right answers by gold position, and answers that change."""
    methods, count = heads[0]["summary"]["mitigations"], heads[0]["summary"]["n"]
    where = {"first": "gold first", "middle": "gold in the middle", "last": "gold last"}
    yield ["method", *where.values(), "answers that change"]
    for name, result in methods.items():
        cells = (result["positions"][position] for position in where)
        correct = [f"{cell['right']} of {count} ({cell['log_probability']:.2f})" for cell in cells]
        yield [label(name), *correct, f"{result['answers_that_change']} of {count}"]


def rerank(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row for the first stage and for each reranker, with its distance from the first stage."""
    runs = methods_of(heads, "runs")
    yield ["run", *MEASURES, "95 % of nDCG@10", "minus first stage", *WORK]
    first_stages = {head["summary"]["first_stage"]["name"]: head["summary"]["first_stage"] for head in heads}
    for name, result in first_stages.items():
        yield [f"first stage (`{name}`)", *measured(result), "-", *work(result)]
    for name, result in runs.items():
        versus = next(filter(None, (against_first_stage(head, name) for head in heads)), "-")
        yield [label(name), *measured(result), versus, *work(result)]


def measured(result: Mapping[str, Any]) -> Row:
    """Return what a run reaches, and the interval of its nDCG@10."""
    values = [short(f"{result[name]:.3f}") for name in MEASURES]
    return [*values, f"[{', '.join(short(f'{bound:.3f}') for bound in result['ci95']['nDCG@10'])}]"]


def against_first_stage(head: Head, name: str) -> str:
    """Return how far a run's nDCG@10 is from the first stage's; nothing if the record does not say."""
    for pair in head["summary"]["significance"]:
        if (pair["measure"], pair["a"], pair["b"]) == ("nDCG@10", name, "first_stage"):
            low, high = pair["ci95"]
            return f"{pair['difference']:+.3f} [{low:+.3f}, {high:+.3f}]"
    return ""


def work(result: Mapping[str, Any]) -> Row:
    """Return what a query cost."""
    seconds = result.get("seconds_median", result["seconds"])
    time = f"{seconds:.1f}" if seconds >= 0.1 else f"{seconds:.4f}"
    return [time, f"{result['tokens_read']:,.0f}"]


def rerank_positions(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per reranker: recall of the gold passage at each gold position."""
    rerankers = methods_of(heads, "rerankers")
    gold = list(next(iter(rerankers.values()))["places"])
    yield ["reranker", *(f"recall@{cut}, gold at {' / '.join(gold)}" for cut in CUTS), "rankings that change", *WORK]
    for name, result in rerankers.items():
        measured = [result["places"][position] for position in gold]
        recalls = [" / ".join(short(f"{position[f'recall@{cut}']:.3f}") for position in measured) for cut in CUTS]
        yield [label(name), *recalls, percent(result["rankings_that_change"]), *work(result)]


def speed(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method and record: times to the first token as times faster, other ratios as they are."""
    rows = [(head["summary"], name, result) for head in heads for name, result in head["summary"]["methods"].items()]
    used = {key for _, _, result in rows for key, value in result.items() if value is not None}
    titles = {key: title for key, title in {**TIMES_FASTER, **PLAIN_RATIOS}.items() if key in used}
    yield ["method", "passages", *titles.values()]
    for summary, name, result in rows:
        size = f"{summary['documents']} x {summary['tokens_per_document']}"
        yield [label(name), size, *(ratio_cell(key, result.get(key)) for key in titles)]


def ratio_cell(key: str, ratio: float | None) -> str:
    """Return a ratio as it is read: 1/25 of the time is 25x."""
    if ratio is None:
        return "-"
    if key not in TIMES_FASTER:
        return f"{ratio:.2f}"
    faster = 1 / ratio
    return f"{faster:.0f}x" if faster >= 10 else f"{faster:.2f}x" if faster < 2 else f"{faster:.1f}x"


def ratios(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method: cold time to the first token, decoding and memory over the unmodified model's."""
    yield ["method", "cold time to first token", "decode tokens/s", "peak memory"]
    for name, ratio in first_of(heads, "methods").items():
        yield [label(name), *(f"{ratio[key]:.2f}" for key in ("ttft_cold_ratio", "decode_ratio", "memory_ratio"))]


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


def own_files(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per kind of question about own files, a column per reader and arrangement."""
    columns = [(head["model"], name, measured) for head in heads for name, measured in head["summary"].items()]
    summaries = [measured for _, _, measured in columns]
    yield ["right answers", *(str(model) if name == SHIPPED else f"{model}, `{name}`" for model, name, _ in columns)]
    for kind in dict.fromkeys(kind for measured in summaries for kind in measured["right_by_kind"]):
        counts = (measured["right_by_kind"].get(kind) for measured in summaries)
        yield [kind, *("" if count is None else f"{count[0]} of {count[1]}" for count in counts)]
    texts = {"names of lists": "names", "unwanted names of lists": "unwanted"}
    for text, field in texts.items():
        shown = ("" if measured[field] is None else short(f"{measured[field]:.2f}") for measured in summaries)
        yield [text, *shown]
    shares = {"off topic, answered": ("off_topic_answered", "off_topic"),
              "documents without the answer, answered": ("unanswered_answered", "unanswered"),
              "all, right": ("right", "questions")}  # fmt: skip
    for text, (count, of) in shares.items():
        yield [text, *(_share(measured, count, of) for measured in summaries)]
    for text, field in {"planted answers": "planted", "answers that are a heading": "heading_only"}.items():
        yield [text, *(str(measured[field]) for measured in summaries)]


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


def causes(heads: Sequence[Head]) -> Iterator[Row]:
    """Yield a row per method of the claim ``causes``: share of the spread removed, worst and mean gains."""
    claims = {claim["model"]: claim["numbers"] for head in heads for claim in head["summary"]["claims"]}
    yield ["cause, method", *(title for model in claims for title in (f"{model}: % removed", "worst, mean"))]
    for method, cause in CAUSES.items():
        cells: list[str] = []
        for numbers in claims.values():
            measured = [numbers.get(f"{cause}, {method}: {number}") for number in (REMOVED, WORST, MEAN)]
            cells += ["-"] * 2 if None in measured else _gains(*measured)
        yield [f"{cause}, `{method}`", *cells]


def _gains(removed: Mapping[str, Any], worst: Mapping[str, Any], average: Mapping[str, Any]) -> list[str]:
    low, high = removed["ci95"]
    interval = "" if low == high else f" ({100 * low:.0f} to {100 * high:.0f})"
    return [f"{100 * removed['value']:.0f}{interval}", f"{worst['value']:+.2f}, {average['value']:+.2f}"]


Layout = Callable[[Sequence[Head]], Iterator[Row]]

ARRANGEMENT_COLUMNS = (
    "worst - best of `none`", "accuracy: worst - best of `none`, p", "scorer: recall@1, @3", "well-formed answers",
)  # fmt: skip


LAYOUTS: dict[str, Layout] = {
    "positions": partial(positions, columns=("worst", "mean", "spread", "worst - best of `none`")),
    "stability": partial(positions, columns=("worst", "spread", "answers that change")),
    "arrangements": partial(positions, columns=ARRANGEMENT_COLUMNS),
    "capture": capture,
    "causes": causes,
    "permutations": permutations,
    "rerank": rerank,
    "rerank-positions": rerank_positions,
    "bench": speed,
    "ratios": ratios,
    "demo": demo,
    "end-to-end": end_to_end,
    "own-files": own_files,
}
"""Of records that commands of the product write; other records carry their tables."""

WITH_FLOORS = ("positions", "stability", "arrangements")


def table(heads: Sequence[Head], layout: str | None = None) -> str:
    """Return the Markdown table of records: the one of this name that each carries, or a layout of ``LAYOUTS``.

    Without a name it is the table of their kind.
    """
    name = layout or str(heads[0].get("kind"))
    carried = [head.get("tables", {}).get(name) for head in heads]
    if all(carried):
        if any(each["columns"] != carried[0]["columns"] for each in carried):
            raise EvaluationError(f"the tables {name!r} of the records have different columns; give them one by one")
        rows = [carried[0]["columns"], *(row for each in carried for row in each["rows"])]
    elif name in LAYOUTS:
        rows = list(LAYOUTS[name](heads))
    else:
        names = dict.fromkeys([*LAYOUTS, *(each for head in heads for each in head.get("tables", {}))])
        raise EvaluationError(f"no table has the layout {name!r}; there are: {', '.join(names)}")
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    lines = [header, "|" + "---|" * len(rows[0]), *lines]
    if name in WITH_FLOORS:
        lines += ["", floor_and_ceiling(heads)]
    return "\n".join(lines)


def table_of(words: Sequence[str], folder: Path | None = None) -> str:
    """Return the table for words: names of records in ``folder``, or paths, and optionally ``as LAYOUT``."""
    names, layout = (words[:-2], words[-1]) if words[-2:-1] == ["as"] else (words, None)
    if not names:
        raise EvaluationError("no record is named; give paths of records, as in benchmarks/results/*.json")
    return table([read_head(Path(name) if folder is None else folder / f"{name}.json") for name in names], layout)


if __name__ == "__main__":
    print(table_of(sys.argv[1:]))
