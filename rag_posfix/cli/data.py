"""``rag-posfix data``: checks files of evaluation data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rag_posfix.cli.options import AsJson
from rag_posfix.cli.output import emit, say

app = typer.Typer(help="Check evaluation data.", no_args_is_help=True)
_SHOWN_PROBLEMS = 100


@app.callback()
def group() -> None:
    """Check evaluation data."""


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Check the labelled questions of this file.")],
    passages: Annotated[
        Path | None,
        typer.Option("--passages", help="Read the passages that its rows name.", show_default="in the rows"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with which row of labelled questions.

    Reads what measure --data reads: JSON lines or CSV with --passages, Lost-in-the-Middle and HotpotQA rows, SQuAD's
    format. The exit code is 1 if a row cannot be used.
    """
    from rag_posfix.evaluation.data.labels import check_labels

    usable, problems = check_labels(file, passages)

    def show(_: dict[str, Any]) -> None:
        say(*(f"row {p.row}: {p.severity}: {p.message}" for p in problems[:_SHOWN_PROBLEMS]))
        if len(problems) > _SHOWN_PROBLEMS:
            say(f"and {len(problems) - _SHOWN_PROBLEMS} more; --json lists all")
        say(f"{usable} questions can be used, {len(problems)} problems")

    emit({"usable": usable, "problems": [asdict(problem) for problem in problems]}, as_json, show)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(1)
