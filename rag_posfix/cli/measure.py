"""``rag-posfix measure``, ``report`` and ``data``: a model's position bias on one's own documents, and what to use.

``rag-posfix demo``: answers of a real model by the position of the gold passage, without and with a method.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.checkpoints import READERS, is_here
from rag_posfix.cli.ask import read_questions
from rag_posfix.cli.options import (
    AsJson,
    Fresh,
    Limit,
    check_searchable,
    checked_choice,
    emit,
    err,
    open_engine,
    out,
    out_option,
    progress_bar,
    progress_with_text,
    say,
    say_files,
    status,
    table,
    with_settings,
)
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings
from rag_posfix.text import clean_text

if TYPE_CHECKING:
    from langchain_core.documents import Document

    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.demo_data import DemoQuestion
    from rag_posfix.evaluation.data.questions import PositionExample
    from rag_posfix.generation.engine import Engine
    from rag_posfix.measuring.choice import AskedQuestion, Budget
    from rag_posfix.measuring.measure import MeasureOptions, WrittenJournal
    from rag_posfix.pipeline.pipeline import Pipeline
    from rag_posfix.retrieval.base import PassageRetriever


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
    from rag_posfix.evaluation.data.collection import load_labels
    from rag_posfix.evaluation.record import file_digest
    from rag_posfix.measuring.choice import Budget, find_questions, from_examples
    from rag_posfix.measuring.measure import WRITTEN_JOURNAL, MeasureOptions, WrittenJournal, measure, same_by
    from rag_posfix.pipeline.build import build_pipeline

    examples = [] if data is None else load_labels(data, passages, limit)
    options = MeasureOptions(minutes, orders, documents, seed, fresh, prices)
    asks_itself = settings.model_copy(update={"mitigation": "none", "profile": None})
    with status("loading the model and the index"):
        pipeline = build_pipeline(asks_itself, index=index)
    budget = Budget(minutes)
    asked: list[AskedQuestion] = []
    dropped: Counter[str] = Counter()
    refusals: list[str] = []
    with closing(pipeline), progress_with_text() as report:
        if rows is not None:
            asked, dropped = find_questions(
                pipeline, [(row.id, row.question) for row in rows][:limit], refusals.append
            )
        elif data is None:
            journal = WrittenJournal(output / WRITTEN_JOURNAL, fresh=fresh)
            examples, dropped = _written(pipeline, Path(index or ""), journal, limit, options, budget, report)
        _show_left_out(dropped, refusals)
        asked, source = asked or from_examples(examples, documents), questions or data
        record = measure(
            pipeline, asked, examples=examples, options=options, dropped=dropped, out=output, report=report,
            budget=budget.remaining(),
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
    journal: WrittenJournal,
    limit: int | None,
    options: MeasureOptions,
    budget: Budget,
    report: Callable[[int, int, str], None],
) -> tuple[list[PositionExample], Counter[str]]:
    """Return questions that were written from the passages of an index, in at most a third of the budget.

    Where the writer wrote less than half of them, sentences with a gap fill up.
    """
    from rag_posfix.measuring.measure import gap_questions, write_questions
    from rag_posfix.retrieval.index.storage import read_entries

    count = limit or _DEFAULT_QUESTIONS
    index_passages = [entry.document for entry in read_entries(index).values()]
    examples, dropped = write_questions(
        pipeline, index_passages, count, documents=options.documents, seed=options.seed,
        journal=journal, in_time=lambda: budget.left(1 / 3) > 0, report=report,
    )  # fmt: skip
    if len(examples) < count / 2:
        examples += gap_questions(
            pipeline, index_passages, count - len(examples), documents=options.documents, seed=options.seed,
            leave_out={example.id for example in examples},
        )  # fmt: skip
    return examples, dropped


def _written_name(examples: list[PositionExample]) -> str:
    from rag_posfix.measuring.measure import GAP

    gaps = sum(GAP in example.question for example in examples)
    return "written from the index" + (f", {gaps} of {len(examples)} as sentences with a gap" if gaps else "")


def _digest(questions: list[AskedQuestion]) -> str:
    from rag_posfix.text import content_hash

    return content_hash(*(text for question in questions for text in (question.id, question.text)))


def _show(result: dict[str, Any]) -> None:
    from rag_posfix.measuring.report import measured_table

    say(result["verdict"], result["causes"]["text"])
    columns, numbers = measured_table(result)
    rows = table(*columns)
    for name, *values in numbers:
        rows.add_row(name, *("" if value is None else f"{value:.2f}" for value in values))
    out().print(rows, markup=False)
    say_files(result, "report", "profile", "record")


def report(
    records: Annotated[list[Path], typer.Argument(help="Show these records, each the .json file.")],
    output: Annotated[Path, typer.Option("--out", help="Write this HTML file; table and charts beside it.")],
    as_json: AsJson = False,
) -> None:
    """Turn result records into one HTML page, and compare two.

    Records of measure, eval and bench have tables, those of measure and eval positions also charts; every other record
    has its summary. Beside the page are the table as CSV and LaTeX, and each chart as SVG and PNG.
    """
    from rag_posfix.evaluation.record import read_record
    from rag_posfix.measuring.comparison import compare_records
    from rag_posfix.measuring.report import write_report

    if output.suffix != ".html":
        raise ConfigError(f"--out {str(output)!r} must end in .html")
    read = [read_record(path) for path in records]
    files = write_report(read, output)
    compared = compare_records(read)

    def show(result: dict[str, Any]) -> None:
        for difference in compared or ():
            say(difference.sentence)
        say_files(result, *files)

    told = {} if compared is None else {"compared": [asdict(difference) for difference in compared]}
    emit({**{name: str(path) for name, path in files.items()}, **told}, as_json, show)


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
    from rag_posfix.evaluation.data.collection import check_labels

    usable, problems = check_labels(file, passages)

    def show(_: dict[str, Any]) -> None:
        say(*(f"row {p.row}: {p.severity}: {p.message}" for p in problems[:_SHOWN_PROBLEMS]))
        if len(problems) > _SHOWN_PROBLEMS:
            say(f"and {len(problems) - _SHOWN_PROBLEMS} more; --json lists all")
        say(f"{usable} questions can be used, {len(problems)} problems")

    emit({"usable": usable, "problems": [asdict(problem) for problem in problems]}, as_json, show)
    if any(problem.severity == "error" for problem in problems):
        raise typer.Exit(1)


PASSAGES = 10
GOLD_POSITIONS = {"first": 0, "middle": 5, "last": PASSAGES - 1}
ANSWER_TOKENS = 20
PASSAGE_BYTES = 2**30
"""The size limit of the passage KV store in memory."""

DEMO_MODEL = READERS[-1]
DEMO_NOTE = (
    "The demo reads with the smallest packaged model; other commands take the largest that is fetched (rag-posfix "
    "models list)."
)

NEXT = """\
Where to go next:
  rag-posfix index YOUR_FILES --out my.index         index text, HTML, PDF, JSON lines
  rag-posfix ask "Your question?" --index my.index   answers with sources
  rag-posfix serve --index my.index                  an OpenAI-compatible service
  rag-posfix methods                                 every method and its paper
Does your model have this problem, on your documents, and what should you use?
  rag-posfix measure --index my.index --questions questions.txt --out report"""


@dataclass(frozen=True, slots=True)
class _Cell:
    """One answer, with one method and one position of the gold passage."""

    question: str
    expected: str
    mitigation: str
    gold: str
    answer: str
    right: bool
    log_probability: float
    seconds: float


@with_settings("model", "adapter", "device")
def demo(
    settings: Settings,
    questions: Annotated[int, typer.Option("--questions", min=1, max=24, help="Ask this number of questions.")] = 3,
    mitigation: Annotated[
        str, typer.Option("--mitigation", help="Compare this method with the unmodified model.")
    ] = "default",
    as_json: AsJson = False,
) -> None:
    """Compare answers with and without a method, on demo data.

    The demo retrieves ten passages per question from the shipped corpus, and puts the gold passage, which holds the
    answer, first, in the middle and last.
    """
    method = checked_choice(mitigation)
    choices = {"none": checked_choice("none"), mitigation: method}
    started = time.perf_counter()
    if "model" not in settings.model_fields_set and is_here(DEMO_MODEL, settings.cache_dir):
        settings = settings.model_copy(update={"model": DEMO_MODEL})
        if not as_json:
            say(DEMO_NOTE)
    engine = open_engine(settings, PASSAGE_BYTES)
    with tempfile.TemporaryDirectory(prefix="rag-posfix-demo-") as folder:
        retriever, indexed = _index(Path(folder) / "demo.index", settings)
        cells = _compare(engine, retriever, questions, choices)
    seconds = time.perf_counter() - started

    def show(_: dict[str, Any]) -> None:
        _demo_show(cells, engine.model_id, indexed, mitigation)
        say(f"\nTook {seconds:.0f} s.\n\n{NEXT}")

    rows = [asdict(cell) for cell in cells]
    emit({"model": engine.model_id, "passages": indexed, "rows": rows, "seconds": seconds}, as_json, show)


def _index(folder: Path, settings: Settings) -> tuple[PassageRetriever, int]:
    """Embed and save the corpus, then load the index back, as `index` and `ask` do."""
    from rag_posfix.demo_data import load_passages
    from rag_posfix.pipeline.build import build_embeddings
    from rag_posfix.retrieval.base import PassageRetriever
    from rag_posfix.retrieval.faiss_store import FaissVectorStore

    passages = load_passages()
    with status(f"indexing {len(passages)} passages"):
        embeddings = build_embeddings(settings)
        store = FaissVectorStore(embeddings)
        store.add_documents(passages)
        store.save(folder)
        return PassageRetriever(store=FaissVectorStore.load(folder, embeddings), k=PASSAGES), len(passages)


def _compare(
    engine: Engine, retriever: PassageRetriever, count: int, choices: dict[str, MitigationChoice]
) -> list[_Cell]:
    from rag_posfix.assembly.assembler import Assembler
    from rag_posfix.demo_data import load_questions
    from rag_posfix.evaluation.answers.experiment import answer_and_score
    from rag_posfix.evaluation.statistics import best_subspan_em

    assembler = Assembler(engine.encoder, engine.context_window)
    questions = load_questions()[:count]
    cells: list[_Cell] = []
    total = len(questions) * len(GOLD_POSITIONS) * 2
    with progress_bar("answering") as progress:
        for question in questions:
            hits = retriever.retrieve(question.question, PASSAGES)
            for name in choices:
                for where, gold_position in GOLD_POSITIONS.items():
                    layout = assembler.assemble(
                        question.question,
                        _with_gold_at(hits, question, gold_position),
                        order="original",
                        max_new_tokens=ANSWER_TOKENS,
                    ).layout
                    asked = time.perf_counter()
                    generation, score = answer_and_score(engine, layout, choices[name], question.answer, ANSWER_TOKENS)
                    seconds, text = time.perf_counter() - asked, " ".join(generation.text.split())
                    correct = bool(best_subspan_em(text, question.answers))
                    cells.append(_Cell(question.question, question.answer, name, where, text, correct, score, seconds))
                    progress(len(cells), total)
                    if not err().is_terminal:
                        err().print(f"answered {len(cells)} of {total}", highlight=False)
    return cells


def _with_gold_at(hits: list[Document], question: DemoQuestion, gold_position: int) -> list[Document]:
    """Return the retrieved passages with the gold passage at a position; it replaces the last if it was not found."""
    from rag_posfix.demo_data import load_passages

    gold = next((document for document in hits if document.id == question.gold), None)
    other_documents = [document for document in hits if document.id != question.gold][: PASSAGES - 1]
    if gold is None:
        gold = next(passage for passage in load_passages() if passage.id == question.gold)
        gold.metadata["relevance_score"] = other_documents[-1].metadata["relevance_score"]
    return [*other_documents[:gold_position], gold, *other_documents[gold_position:]]


def _demo_show(cells: list[_Cell], model: str, indexed: int, mitigation: str) -> None:
    from rich.markup import escape

    console = out()
    console.print(
        f"\n{model} answers from {PASSAGES} of {indexed} passages. Only the position of the gold passage, which holds "
        "the answer, changes.\n",
        highlight=False,
    )
    names = ("none", mitigation)
    for question in dict.fromkeys(cell.question for cell in cells):
        rows = [cell for cell in cells if cell.question == question]
        title = f"{escape(question)}  [dim]({escape(rows[0].expected)})[/dim]"
        answers = table("gold passage", *map(_shown_name, names), title=title, title_justify="left")
        for where in GOLD_POSITIONS:
            answers.add_row(where, *(_mark(_cell_of(rows, name, where)) for name in names))
        console.print(answers)
    console.print(_verdict(cells, names), _cost(cells, names), sep="\n", highlight=False)


def _shown_name(name: str) -> str:
    return "unmodified" if name == "none" else name


def _cell_of(cells: list[_Cell], name: str, where: str) -> _Cell:
    return next(cell for cell in cells if cell.mitigation == name and cell.gold == where)


def _mark(cell: _Cell) -> str:
    from rich.markup import escape

    colour, mark = ("green", "✓") if cell.right else ("red", "✗")
    return f"[{colour}]{mark} {escape(cell.answer)}[/{colour}]"


def _verdict(cells: list[_Cell], names: tuple[str, str]) -> str:
    """Return how many answers are right, and for how many questions that depends on where the gold passage is."""
    sentences = []
    for name in names:
        rows = [cell for cell in cells if cell.mitigation == name]
        by_question: dict[str, set[bool]] = {}
        for cell in rows:
            by_question.setdefault(cell.question, set()).add(cell.right)
        changed = sum(len(values) > 1 for values in by_question.values())
        sentences.append(
            f"{_shown_name(name)}: {sum(cell.right for cell in rows)} of {len(rows)} right, and for {changed} of "
            f"{len(by_question)} questions that depends on the order"
        )
    return "; ".join(sentences) + "."


def _cost(cells: list[_Cell], names: tuple[str, str]) -> str:
    """Return the mean seconds of an answer, of the first to a question and of the others."""
    parts = []
    first, *_ = GOLD_POSITIONS
    for name in names:
        cold, warm = (
            mean(cell.seconds for cell in cells if cell.mitigation == name and (cell.gold == first) is new)
            for new in (True, False)
        )
        parts.append(f"{_shown_name(name)} {cold:.1f} s and {warm:.1f} s")
    return f"Answer and score took, with new passages and with passages that were read before: {'; '.join(parts)}."
