"""``rag-posfix demo``: answers of a real model by the position of the gold passage, without and with a method."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
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
    engine = load_engine(settings, PASSAGE_BYTES)
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


def _show(cells: list[_Cell], model: str, indexed: int, mitigation: str) -> None:
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

    text = cell.answer if len(cell.answer) <= 60 else cell.answer[:57] + "..."
    return f"[green]✓ {escape(text)}[/green]" if cell.right else f"[red]✗ {escape(text)}[/red]"


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
