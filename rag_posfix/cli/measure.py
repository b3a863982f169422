"""``rag-posfix measure``, ``report`` and ``data``: a model's position bias on one's own documents, and what to use."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.ask_many import read_questions
from rag_posfix.cli.options import AsJson, Fresh, Limit, check_searchable, out_option, with_settings
from rag_posfix.cli.output import emit, err, out, progress_with_text, say, say_files, status, table
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix.text import clean_text

if TYPE_CHECKING:
    from rag_posfix.evaluation.data.questions import PositionExample
    from rag_posfix.measuring.flips import AskedQuestion
    from rag_posfix.measuring.measure import MeasureOptions
    from rag_posfix.pipeline.pipeline import Pipeline

_DEFAULT_QUESTIONS = 50
_SHOWN_PROBLEMS = 100
_SHOWN_REFUSALS = 3

Questions = Annotated[
    Path | None,
    typer.Option("--questions", help="Ask these: JSON lines, or a .txt file.", show_default="written from the index"),
]
Labels = Annotated[
    Path | None, typer.Option("--data", help="Ask these questions with labels; no --index.", show_default="none")
]
Passages = Annotated[
    Path | None,
    typer.Option("--passages", help="Read the passages that --data names, JSON lines.", show_default="none"),
]
Prices = Annotated[
    tuple[float, float] | None,
    typer.Option("--prices", show_default="none", help="Tell the cost: prices per million tokens, sent and written."),
]


@with_settings(
    "model", "adapter", "device", "k", "retriever", "min_relevance", "template", "max_tokens", "writer", "reranker"
)  # fmt: skip
def measure(
    context: typer.Context,
    output: Annotated[Path, out_option("Write report, profile, record and journal here.")],
    settings: Settings,
    index: Annotated[
        Path | None, typer.Option("--index", help="Find the passages in this index folder.", show_default="none")
    ] = None,
    questions: Questions = None,
    data: Labels = None,
    passages: Passages = None,
    documents: Annotated[
        int, typer.Option("--documents", min=2, help="Use this number of passages per question of --data.")
    ] = 10,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Stop measuring after this time.")] = 10.0,
    orders: Annotated[int, typer.Option("--orders", min=2, help="Ask each question in this number of orders.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Draw orders and written questions by this seed.")] = 0,
    limit: Limit = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Let --writer judge whether two answers say the same.")
    ] = False,
    prices: Prices = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Measure the position bias of a model on your documents.

    Asks each question over the passages that your index or vector store finds, in random orders and, as a control, in
    one order twice. Labels also say which position the model reads best. Then the command compares pipeline variants,
    and writes the one to use to OUT/profile.json, for serve --profile and ask --profile.

    The same command continues after an interruption.
    """
    _check_usage(index, questions, data, passages, settings)
    rows = None if questions is None else read_questions(questions, None, False)
    from rag_posfix.evaluation.data.labels import load_labels
    from rag_posfix.evaluation.record import file_digest
    from rag_posfix.measuring.flips import find_questions, from_examples
    from rag_posfix.measuring.measure import MeasureOptions, measure
    from rag_posfix.measuring.written_questions import JOURNAL as WRITTEN
    from rag_posfix.measuring.written_questions import same_by
    from rag_posfix.pipeline.build import build_pipeline

    examples = [] if data is None else load_labels(data, passages, limit)
    options = MeasureOptions(minutes, orders, documents, seed, fresh, prices)
    asks_itself = settings.model_copy(update={"mitigation": "none", "profile": None})
    with status("loading the model and the index"):
        pipeline = build_pipeline(asks_itself, index=index)
    asked: list[AskedQuestion] = []
    dropped: Counter[str] = Counter()
    refusals: list[str] = []
    with closing(pipeline), progress_with_text() as report:
        if rows is not None:
            asked, dropped = find_questions(
                pipeline, [(row.id, row.question) for row in rows][:limit], refusals.append
            )
        elif data is None:
            examples, dropped = _written(pipeline, Path(index or ""), output / WRITTEN, limit, options, report)
        _show_left_out(dropped, refusals)
        asked, source = asked or from_examples(examples, documents), questions or data
        record = measure(
            pipeline, asked, examples=examples, options=options, dropped=dropped, out=output, report=report,
            judge=same_by(pipeline.writer or pipeline.generator) if judge else None,
            command=_shell_command(context.obj, settings.retriever),
            data={"name": source.name if source else _written_name(examples),
                  "sha256": file_digest(source) if source else _digest(asked)},
        )  # fmt: skip
    emit(record.to_json(), as_json, _show)


def _show_left_out(dropped: Counter[str], refusals: list[str]) -> None:
    lines = [*(f"left out: {count} ({reason})" for reason, count in dropped.items()), *refusals[:_SHOWN_REFUSALS]]
    for line in lines:
        err().print(line, markup=False, highlight=False, soft_wrap=True)


def _check_usage(
    index: Path | None, questions: Path | None, data: Path | None, passages: Path | None, settings: Settings
) -> None:
    """Raise unless the options name one source of passages, and its index is there."""
    if (data is None) == (index is None and questions is None):
        raise ConfigError(
            "give one of three: --index, with --questions or without; --data, with labels; --questions, with a vector "
            "store as --retriever KIND:key=value,..."
        )
    if data is None and passages is not None:
        raise ConfigError(
            f"--passages {str(passages)!r} is read for --data alone; give the labelled questions as --data, or index "
            "the passages and give --index"
        )
    if data is None:
        check_searchable(index, settings)


def _shell_command(words: list[str] | None, retriever: str) -> str | None:
    """Return the command to copy into a shell, without what may be a password; None where the words are not known."""
    from rag_posfix.text import hide_passwords

    if words is None:
        return None
    kind, _, options = retriever.partition(":")
    shown = [hide_passwords(word.replace(retriever, f"{kind}:...") if options else word) for word in words]
    return clean_text(shlex.join(["rag-posfix", *shown]))


def _written(
    pipeline: Pipeline,
    index: Path,
    journal: Path,
    limit: int | None,
    options: MeasureOptions,
    report: Callable[[int, int, str], None],
) -> tuple[list[PositionExample], Counter[str]]:
    """Return questions that were written from the passages of an index, in at most a third of the time.

    Where the writer wrote less than half of them, sentences with a gap fill up.
    """
    from rag_posfix.measuring.written_questions import WrittenJournal, gap_questions, write_questions
    from rag_posfix.retrieval.index.storage import read_entries

    until, count = time.monotonic() + 20 * options.minutes, limit or _DEFAULT_QUESTIONS
    index_passages = [entry.document for entry in read_entries(index).values()]
    examples, dropped = write_questions(
        pipeline, index_passages, count, documents=options.documents, seed=options.seed,
        journal=WrittenJournal(journal, fresh=options.fresh), in_time=lambda: time.monotonic() < until, report=report,
    )  # fmt: skip
    if len(examples) < count / 2:
        examples += gap_questions(
            pipeline, index_passages, count - len(examples), documents=options.documents, seed=options.seed,
            leave_out={example.id for example in examples},
        )  # fmt: skip
    return examples, dropped


def _written_name(examples: list[PositionExample]) -> str:
    from rag_posfix.measuring.written_questions import GAP

    gaps = sum(GAP in example.question for example in examples)
    return "written from the index" + (f", {gaps} of {len(examples)} as sentences with a gap" if gaps else "")


def _digest(questions: list[AskedQuestion]) -> str:
    from rag_posfix.text import content_hash

    return content_hash(*(text for question in questions for text in (question.id, question.text)))


def _show(result: dict[str, Any]) -> None:
    say(result["verdict"])
    rows = table("arrangement", "worst", "mean", "second", "well formed", "time to first token")
    for name, values in result["measured"].items():
        numbers = (values["worst"], values["mean"], values["second"], values["well_formed"], values["ttft_ratio"])
        rows.add_row(name, *(f"{number:.2f}" for number in numbers))
    out().print(rows, markup=False)
    say_files(result, "report", "profile", "record")


def report(
    records: Annotated[list[Path], typer.Argument(help="Show these records, each the .json file.")],
    output: Annotated[Path, typer.Option("--out", help="Write this HTML file; table and charts beside it.")],
    as_json: AsJson = False,
) -> None:
    """Turn result records into one self-contained HTML page.

    Records of measure, eval and bench have tables, those of measure and eval positions also charts; every other record
    has its summary. Beside the page are the table as CSV and LaTeX, and each chart as SVG and PNG.
    """
    from rag_posfix.evaluation.record import read_record
    from rag_posfix.measuring.report import write_report

    if output.suffix != ".html":
        raise ConfigError(f"--out {str(output)!r} must end in .html")
    files = write_report([read_record(path) for path in records], output)
    emit({name: str(path) for name, path in files.items()}, as_json, lambda result: say_files(result, *files))


data = typer.Typer(help="Check evaluation data.", no_args_is_help=True)


@data.callback()
def data_group() -> None:
    """Check evaluation data."""


@data.command()
def check(
    file: Annotated[Path, typer.Argument(help="Check the labelled questions of this file.")],
    passages: Annotated[
        Path | None,
        typer.Option("--passages", help="Read the passages that its rows name.", show_default="in the rows"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the faulty rows of labelled questions and why.

    Reads what measure --data reads: JSON lines, CSV or Parquet with --passages, rows of Lost in the Middle or
    HotpotQA, SQuAD's format. The exit code is 1 if a row cannot be used.
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
