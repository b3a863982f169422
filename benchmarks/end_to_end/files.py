"""The files of the gate: copies of the committed ones, and PDF, Word and a long manual made from committed text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from csv import DictReader
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.support import OVERRIDE
from rag_posfix.evaluation.data.questions import HOSTILE
from tests.support.pdf_files import assemble_pdf, shown_lines

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
OWN_FILES = "own_files"
"""Questions about files as people have them, by kind of question; their files are in a folder of this name."""
SHIPPED = "shipped"
"""The arrangement that a question gets that names none."""
TWO_FILES = "two_files"
"""Questions whose answer is in a file that only the name in another one leads to; read among all others."""

Half = Literal["choose", "report"]
Kind = Literal[
    "headings", "tables", "lists", "faq", "forum", "pdf", "docx", "html", "manual", "tickets", "records", "languages",
    "filters", "follow-ups", "denied", "off-topic", "titled", "short", "hostile", "unanswered", "two-files",
]  # fmt: skip
_PAGE_END = "\n\\f\n"


@dataclass(frozen=True, slots=True)
class GateQuestion:
    """A question about the files.

    Attributes:
        answers: Accepted forms of the answer; none where the files, or those that may be read, do not answer it.
        gold: The file with the answer; the forbidden file of a ``denied`` question; empty off topic.
        evidence: A text of the passage with the answer; without it a passage of the gold file with an answer is one.
        near: Whether an off-topic question asks for what the files tell about others.
        unwanted: Names that an answer of the kind ``lists`` of ``OWN_FILES`` must not hold. There each of ``answers``
            is wanted, as one of the forms that ``|`` separates.
        whole_words: Whether an answer holds whole words of an accepted form: 23 is no part of 123.
        documents: Texts that are sent with an ``unanswered`` question: of its subject, without the answer.
        bridge: A text of the other passage that a question of the kind ``two-files`` needs: it has the name.
        planted: The wrong answer of the documents that are sent with a ``hostile`` question beside what was retrieved.
    """

    id: str
    kind: Kind
    question: str
    answers: tuple[str, ...]
    gold: str
    evidence: str = ""
    filter: Mapping[str, Any] | None = None
    history: tuple[Mapping[str, str], ...] = ()
    near: bool = False
    unwanted: tuple[str, ...] = ()
    whole_words: bool = False
    documents: tuple[str, ...] = ()
    planted: str = ""
    bridge: str = ""

    @property
    def hostile_texts(self) -> tuple[str, ...]:
        """One text repeats the question, one answers it wrongly, one says what to believe of other documents."""
        forms = (HOSTILE["echo"][0], HOSTILE["poison"][0], OVERRIDE) if self.planted else ()
        return tuple(form.format(question=self.question, planted=self.planted) for form in forms)

    @property
    def is_list(self) -> bool:
        """Whether the answer is graded by the names that it holds."""
        return self.whole_words and self.kind == "lists"


def load_questions(name: str = "questions") -> list[GateQuestion]:
    """Return committed questions: of a set, or ``unseen``, on which nothing was ever chosen."""
    lists = ("answers", "history", "unwanted", "documents")
    return [
        GateQuestion(
            **{**row, **{field: tuple(row.get(field, ())) for field in lists}},
            whole_words=name in (OWN_FILES, TWO_FILES),
        )
        for row in map(json.loads, (HERE / f"{name}.jsonl").read_text("utf-8").splitlines())
    ]


def half_of(questions: Sequence[GateQuestion], half: Half) -> list[GateQuestion]:
    """Return the questions with odd numbers, which settings are chosen on, or those with even ones, for reporting."""
    return [question for question in questions if (int(question.id[1:]) % 2 == 1) == (half == "choose")]


def write_files(folder: Path, name: str = "questions") -> list[Path]:
    """Write the files that questions are about into an empty folder and return them."""
    if name == OWN_FILES:
        shutil.copytree(HERE / OWN_FILES, folder)
        return sorted(path for path in folder.rglob("*") if path.is_file())
    shutil.copytree(CORPUS, folder, ignore=shutil.ignore_patterns("made"))
    made = folder / "made"
    made.mkdir()
    for source in sorted((CORPUS / "made").iterdir()):
        target, text = made / source.stem, source.read_text("utf-8").rstrip("\n")
        if source.name.endswith(".pdf.txt"):
            target.write_bytes(pdf_of(text.split(_PAGE_END)))
        elif source.name.endswith(".docx.md"):
            _write_docx(target, text)
        else:
            target.with_suffix(".md").write_text(_manual(text), "utf-8")
    for other in (OWN_FILES, TWO_FILES) if name == TWO_FILES else ():
        shutil.copytree(HERE / other, folder / other)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def pdf_of(pages: Sequence[str]) -> bytes:
    """Return a PDF file of pages of text lines, without an outline: the title and headings are in larger letters.

    A line is a heading if it stands alone in its paragraph; the first is the title. Only Latin-1 letters, no brackets.
    """
    return assemble_pdf([_page_content(page, is_first=number == 0) for number, page in enumerate(pages)])


def _page_content(page: str, *, is_first: bool) -> str:
    paragraphs: list[str] = []
    top = 800
    for paragraph in page.split("\n\n"):
        paragraph = paragraph.strip("\n")
        lines = paragraph.split("\n")
        font = "/F1 11" if len(lines) > 1 else "/F2 22" if is_first and not paragraphs else "/F2 15"
        paragraphs.append(f"BT {font} Tf 14 TL 50 {top} Td {shown_lines(paragraph)} ET")
        top -= 14 * len(lines) + 24
    return "\n".join(paragraphs)


def _write_docx(path: Path, text: str) -> None:
    """Write a Word file with heading styles, lists and tables, from lines of Markdown; ``%`` marks the title."""
    import docx

    document = docx.Document()
    table: list[list[str]] = []
    for line in [*text.split("\n"), ""]:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
            continue
        if table:
            rows = [row for row in table if set("".join(row)) != {"-"}]
            cells = document.add_table(rows=len(rows), cols=len(rows[0]))
            for number, row in enumerate(rows):
                for column, cell in enumerate(row):
                    cells.cell(number, column).text = cell
            table = []
        if line.startswith("% "):
            document.add_heading(line[2:], 0)
        elif line.startswith("# "):
            document.add_heading(line[2:], 1)
        elif line.startswith("- "):
            document.add_paragraph(line[2:], "List Bullet")
        elif line:
            document.add_paragraph(line)
    document.save(str(path))


_CHAPTER = """## {Module}

### Task of the {module}

This chapter is about the {module} of the ferries Aurelia, Bellona and Corvina. Read it to the end before you begin.
The {module} is shown on the plan of the ship with the number {number}. If it was repaired on board, the yard is told.

### Inspection of the {module}

The {module} is inspected after every {hours} hours. Look for cracks, rust and loose screws. Clean it with a dry cloth.
Write the result and the date into the log of the engine room.

### Work on the {module}

Before work on the {module} begins, {warning}. The tool that is needed for the {module} is the {tool}. The bolts of the
{module} are tightened crosswise to {torque} newton metres and marked with paint.

### Spare parts of the {module}

The spare part of the {module} has the number {part}. It is ordered from the store in Halden by telephone.
"""


def _manual(table: str) -> str:
    """Return a manual with a page for each row of a table."""
    rows = list(DictReader(table.split("\n"), delimiter="\t"))
    chapters = [
        _CHAPTER.format(Module=row["module"].capitalize(), number=number, **row)
        for number, row in enumerate(rows, start=1)
    ]
    return "# Maintenance manual\n\n" + "\n".join(chapters)
