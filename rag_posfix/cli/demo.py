"""``rag-posfix demo``: answers of a real model by the position of the gold passage, without and with a method."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag_posfix.cli.options import AsJson, checked_choice, load_engine, with_settings
from rag_posfix.cli.output import emit, err, out, progress_bar, say, status, table
from rag_posfix.settings import Settings
from rag_posfix.weight_packages import READERS, is_here

if TYPE_CHECKING:
    from langchain_core.documents import Document

    from rag_posfix.contracts.request import MitigationChoice
    from rag_posfix.demo_data import DemoQuestion
    from rag_posfix.generation.engine import Engine
    from rag_posfix.retrieval.base import PassageRetriever

PASSAGES = 10
GOLD_POSITIONS = {"first": 0, "middle": 5, "last": PASSAGES - 1}
ANSWER_TOKENS = 20

DEMO_MODEL = READERS[-1]
DEMO_NOTE = (
    "The demo reads with the smallest packaged model, to end within two minutes; other commands take the best that is "
    "fetched (rag-posfix models list)."
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

    The demo indexes the shipped corpus and retrieves ten passages per question. The gold passage, which holds the
    answer, is put first, in the middle and last.
    """
    method = checked_choice(mitigation)
    choices = {"none": checked_choice("none"), mitigation: method}
    started = time.perf_counter()
    if "model" not in settings.model_fields_set and is_here(DEMO_MODEL, settings.cache_dir):
        settings = settings.model_copy(update={"model": DEMO_MODEL})
        if not as_json:
            say(DEMO_NOTE)
    engine = load_engine(settings)
    with tempfile.TemporaryDirectory(prefix="rag-posfix-demo-") as folder:
        retriever, indexed = _index(Path(folder) / "demo.index", settings)
        cells = _compare(engine, retriever, questions, choices)
    seconds = time.perf_counter() - started

    def show(_: dict[str, Any]) -> None:
        _show(cells, engine.model_id, indexed, mitigation)
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
    from rag_posfix.evaluation.answers.answering import answer_and_score
    from rag_posfix.evaluation.grading import best_subspan_em

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
                    generation, score = answer_and_score(engine, layout, choices[name], question.answer, ANSWER_TOKENS)
                    text = " ".join(generation.text.split())
                    correct = bool(best_subspan_em(text, question.answers))
                    cells.append(_Cell(question.question, question.answer, name, where, text, correct, score))
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


def _show(cells: list[_Cell], model: str, indexed: int, mitigation: str) -> None:
    from rich.markup import escape

    console = out()
    console.print(
        f"\n{model} answers from {PASSAGES} of {indexed} passages. Only the position of the gold passage, which holds "
        "the answer, changes. log p: log-probability of the right answer per token; nearer to 0 is better.\n",
        highlight=False,
    )
    names = ("none", mitigation)
    for question in dict.fromkeys(cell.question for cell in cells):
        rows = [cell for cell in cells if cell.question == question]
        title = f"{escape(question)}  [dim]({escape(rows[0].expected)})[/dim]"
        headings = [text for name in names for text in ("unmodified" if name == "none" else name, "log p")]
        answers = table("gold passage", *headings, title=title, title_justify="left")
        for where in GOLD_POSITIONS:
            pair = [next(c for c in rows if c.mitigation == name and c.gold == where) for name in names]
            answers.add_row(where, *(text for cell in pair for text in (_mark(cell), f"{cell.log_probability:.2f}")))
        console.print(answers)
    for name in names:
        console.print(_verdict([cell for cell in cells if cell.mitigation == name], name), highlight=False)


def _mark(cell: _Cell) -> str:
    from rich.markup import escape

    text = cell.answer if len(cell.answer) <= 60 else cell.answer[:57] + "..."
    return f"[green]{escape(text)}[/green]" if cell.right else f"[red]{escape(text)}[/red]"


def _verdict(cells: list[_Cell], name: str) -> str:
    """Return one line: how many answers are right, how many change, and the range of the log-probability."""
    by_question: dict[str, list[_Cell]] = {}
    for cell in cells:
        by_question.setdefault(cell.question, []).append(cell)
    changed = sum(len({cell.answer for cell in rows}) > 1 for rows in by_question.values())
    spread = max(
        max(cell.log_probability for cell in rows) - min(cell.log_probability for cell in rows)
        for rows in by_question.values()
    )
    n_correct = sum(cell.right for cell in cells)
    return (
        f"{'unmodified' if name == 'none' else name}: {n_correct} of {len(cells)} answers right; the answer changes "
        f"with the order in {changed} of {len(by_question)} questions; log p changes by up to {spread:.2f}"
    )
