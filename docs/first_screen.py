"""The first screen of the README: one question in two orders, and what was measured, all from records."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS
from benchmarks.tables import DEFAULT, short
from rag_posfix.cli.measure import GOLD_POSITIONS, PASSAGES
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import read_head, read_record

FIRST, MIDDLE = "first", "middle"
LARGE, SMALL = "Qwen2.5-Coder-1.5B-Instruct", "SmolLM2-135M-Instruct"
JUDGE = "yes_no:top_n=3/reverse/none"
"""What a model of 1.5 billion parameters does by default."""
DATA_SETS = {
    LARGE: (
        JUDGE,
        {
            "Lost in the Middle": "positions-qwen15-litm-10",
            "HotpotQA": "positions-qwen15-hotpotqa-10",
            "XQuAD": "positions-qwen15-xquad-5",
        },
    ),
    SMALL: (
        DEFAULT,
        {
            "XQuAD": "positions-xquad-5-default",
            "Lost in the Middle": "positions-litm-10-default",
            "HotpotQA": "positions-hotpotqa-10-default",
        },
    ),
}
"""Default arrangement and records of each reader: the largest that was measured, then the packaged one."""
FOR_WHOM = (
    "**Use it** if the order of the passages is arbitrary. For a model behind an API only judging, reranking and "
    "ordering are available."
)
NO_HELP = "**It does not help** a small model if answers combine passages (HotpotQA)."
LINE_WIDTH = 119
WIDTH, MARGIN, LINE, SQUARE = 500, 4, 21, 22
INK, RIGHT, WRONG, FAINT = "#222222", "#1f6f54", "#b3382c", "#999999"


def question_of_the_demo(results: Path = RESULTS) -> tuple[str, dict[str, Mapping[str, Any]], Mapping[str, Any]]:
    """Return a question, the answers of the unmodified model by position, and the answer of the method.

    The question is the first one of the record that shows what the bias is: the unmodified model is right with the
    right passage first and wrong with it in the middle, and the method is right with one answer for both.

    Raises:
        EvaluationError: the record has no such question.
    """
    record = read_record(results / "demo-24.json")
    questions: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in record.rows:
        questions.setdefault(row["question"], {})[row["mitigation"], row["gold"]] = row
    method = next(row["mitigation"] for row in record.rows if row["mitigation"] != "none")
    for question, rows in questions.items():
        unmodified = {position: rows["none", position] for position in (FIRST, MIDDLE)}
        corrected = [rows[method, position] for position in (FIRST, MIDDLE)]
        shows_the_bias = [row["right"] for row in unmodified.values()] == [True, False]
        if shows_the_bias and corrected[0]["right"] and corrected[0]["answer"] == corrected[1]["answer"]:
            return question, unmodified, corrected[0]
    raise EvaluationError("demo-24.json has no question whose answer changes under none alone; run the demo again")


def first_screen(results: Path = RESULTS) -> str:
    """Return the figure, what was measured on the demo and on real questions, and what it costs, as Markdown."""
    question, unmodified, corrected = question_of_the_demo(results)
    answers = {position: _plain(row["answer"]) for position, row in unmodified.items()}
    text = (
        f"{question} Right passage first: the unmodified model answers {answers[FIRST]} In the middle: "
        f"{answers[MIDDLE]} rag_posfix answers both times: {_plain(corrected['answer'])}"
    )
    lines = [f"![{text}](docs/images/first-screen.svg)", ""]
    large, small = (_data_sets(results, reader) for reader in DATA_SETS)
    right = f"**Right answers** (unmodified model, by position) of {large}."
    for item in (right, f"The reader of the picture, {small}. {_demo(results)} {NO_HELP}", FOR_WHOM, _cost(results)):
        lines += textwrap.wrap(f"- {item}", LINE_WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _demo(results: Path) -> str:
    """Return how many answers of the demo change with the position."""
    summary = read_head(results / "demo-24.json")["summary"]
    unmodified, method = (result["answers_that_change"] for result in summary["mitigations"].values())
    return f"In the demo {unmodified} of {summary['n']} answers change with the position, {method} with rag_posfix."


def _data_sets(results: Path, reader: str) -> str:
    """Return the accuracy of a reader's default on each data set, and the range of the unmodified model."""
    arrangement, records = DATA_SETS[reader]
    shares, count = [], 0
    for name, record in records.items():
        summary = read_head(results / f"{record}.json")["summary"]
        count = summary["n"]
        unmodified, default = (
            [cell["accuracy"] for cell in summary["mitigations"][method]["positions"].values()]
            for method in ("none", arrangement)
        )
        low, high = (short(f"{value:.2f}") for value in (min(unmodified), max(unmodified)))
        shares.append(f"{name} {short(f'{max(default):.2f}')} ({low} to {high})")
    return f"{reader}, {count} real questions each: {', '.join(shares)}"


def _cost(results: Path) -> str:
    """Return what first and further tokens cost, as multiples of the unmodified model, on processors with AMX."""
    bench = read_head(results / "bench-20x150-matrix-units.json")["summary"]["methods"][DEFAULT]
    judge = read_head(results / "few-passages-20x150-qwen15.json")["summary"][JUDGE]
    small = _times(bench["ttft_cold_ratio"], bench["ttft_warm_memory_ratio"], bench["decode_ratio"])
    large = _times(judge["cold"], judge["warm"], judge["decode"])
    return (
        "**Cost** of 20 passages, two Intel cores with matrix units, relative to the unmodified model: "
        f"{large} ({LARGE}); {small} ({SMALL}). Warm: the passages were read before. No GPU was measured."
    )


def _times(cold: float, warm: float, decode: float) -> str:
    return (
        f"first answer token x {cold:.1f} cold, x {short(f'{warm:.2f}')} warm, each further token x {1 / decode:.1f}"
    )


def draw_first_screen(results: Path = RESULTS) -> str:
    """Return the question, both orders and their answers, as SVG."""
    question, unmodified, corrected = question_of_the_demo(results)
    body = [_text(MARGIN, 30, question, INK, "bold")]
    y = 62
    for position, caption in ((FIRST, "Right passage first"), (MIDDLE, "The same passages, right one in the middle")):
        gold = GOLD_POSITIONS[position]
        body.append(_text(MARGIN, y, caption, INK))
        body += [_square(MARGIN + SQUARE * i, y + 11, i == gold) for i in range(PASSAGES)]
        for name, row in (("unmodified model", unmodified[position]), ("rag_posfix", corrected)):
            verdict, colour = ("✓", RIGHT) if row["right"] else ("✗", WRONG)
            y += LINE + (SQUARE + 6 if name == "unmodified model" else 3)
            body.append(_text(MARGIN, y, f"{name}:", INK, "bold" if name == "rag_posfix" else ""))
            body.append(_text(MARGIN + 142, y, f"{verdict} {_plain(row['answer'])}", colour))
        y += 44
    height = y - 22
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="16" role="img">'
    )
    return "\n".join([opening, f"<title>{escape(question)}</title>", *body, "</svg>", ""])


def _text(x: int, y: int, text: str, colour: str, weight: str = "") -> str:
    bold = ' font-weight="bold"' if weight else ""
    return f'<text x="{x}" y="{y}" fill="{colour}"{bold}>{escape(text)}</text>'


def _square(x: int, y: int, is_gold: bool) -> str:
    fill = f'fill="{RIGHT}"' if is_gold else f'fill="none" stroke="{FAINT}"'
    return f'<rect x="{x + 0.5}" y="{y + 0.5}" width="{SQUARE - 6}" height="{SQUARE - 8}" rx="2" {fill}/>'


def _plain(answer: str) -> str:
    return " ".join(answer.split())
