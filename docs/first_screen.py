"""The question on the first screen of the README: two orders, two answers of the unmodified model, one of a method.

Question and answers are rows of the demo's record, ``benchmarks/results/demo-24.json``. Nothing is typed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.keep_record import RESULTS
from rag_posfix.cli.demo import PASSAGES
from rag_posfix.errors import EvaluationError
from rag_posfix.evaluation.record import read_record

FIRST, MIDDLE = "first", "middle"


def first_screen(results: Path = RESULTS) -> str:
    """Return question and answers as Markdown.

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
        stock = [rows["none", place] for place in (FIRST, MIDDLE)]
        ours = [rows[method, place] for place in (FIRST, MIDDLE)]
        shows_the_bias = [row["right"] for row in stock] == [True, False]
        if shows_the_bias and ours[0]["right"] and ours[0]["answer"] == ours[1]["answer"]:
            return _shown(question, str(record.head["model"]), method, stock, ours[0])
    raise EvaluationError("demo-24.json has no question whose answer changes under none alone; run the demo again")


def _shown(question: str, model: str, method: str, stock: list[Mapping[str, Any]], ours: Mapping[str, Any]) -> str:
    lines = [
        f"**{question}** The same {PASSAGES} passages in two orders, asked to {model}:", "",
        "| the right passage is | unmodified | with rag_posfix |", "|---|---|---|",
    ]  # fmt: skip
    for place, row in (("first", stock[0]), ("in the middle", stock[1])):
        verdict = "right" if row["right"] else "wrong"
        lines.append(f"| {place} | {_cell(row['answer'])} ({verdict}) | {_cell(ours['answer'])} (right) |")
    lines += ["", f"The method `{method}` gives the same answer for every order of the passages."]
    return "\n".join(lines)


def _cell(answer: str) -> str:
    return " ".join(answer.split()).replace("|", "\\|")
