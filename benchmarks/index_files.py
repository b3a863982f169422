"""Times the first index of many files, and an update of it: ``python -m benchmarks.index_files [--files 1000]``.

The files are variants of those of the end-to-end gate, without the manual, each paragraph with its own number; every
second one is a PDF or Word file, slides, a workbook or a table. Timed is ``rag-posfix index``, in a process of its
own, with wall-clock and CPU seconds, and the memory of the largest process. ``--python`` times the program of another
environment over the same files as well, so that two versions of it are compared.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.files import CORPUS, pdf_of
from benchmarks.study import study_options, write_study

_TEXT = (".md", ".txt", ".html")


def write_variants(folder: Path, count: int) -> None:
    """Write ``count`` files with different content."""
    sources = [path for path in sorted(CORPUS.rglob("*")) if path.suffix in _TEXT and path.parent.name != "made"]
    for number in range(count):
        source = sources[number % len(sources)]
        target = folder / f"{number // 100:02}" / f"{source.stem}-{number}{source.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        content = re.sub(rb"\n\n(?=[A-Z])", f"\n\nThis is copy {number}. ".encode(), source.read_bytes())
        if number % 2:
            write = _KINDS[number // 2 % len(_KINDS)]
            write(target, [part for part in content.decode("utf-8", "replace").split("\n\n") if part.strip()])
        else:
            target.write_bytes(content)


def _write_pdf(target: Path, parts: Sequence[str]) -> None:
    text = "\n\n".join(parts).encode("latin-1", "replace").decode("latin-1")
    target.with_suffix(".pdf").write_bytes(pdf_of([text]))


def _write_word(target: Path, parts: Sequence[str]) -> None:
    import docx

    document = docx.Document()
    for part in parts:
        document.add_paragraph(part)
    document.save(str(target.with_suffix(".docx")))


def _write_slides(target: Path, parts: Sequence[str]) -> None:
    import pptx

    slides = pptx.Presentation()
    for part in parts:
        slides.slides.add_slide(slides.slide_layouts[1]).placeholders[1].text = part
    slides.save(str(target.with_suffix(".pptx")))


def _write_workbook(target: Path, parts: Sequence[str]) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    for row in [("number", "part"), *enumerate(parts)]:
        book.worksheets[0].append(row)
    book.save(target.with_suffix(".xlsx"))


def _write_table(target: Path, parts: Sequence[str]) -> None:
    with target.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("number", "part"), *enumerate(parts)])


_KINDS = (_write_pdf, _write_word, _write_slides, _write_workbook, _write_table)


def timed_index(files: Path, index: Path, python: str) -> dict[str, float]:
    """Return wall-clock and CPU seconds of ``rag-posfix index``, and the numbers that it prints."""
    started = time.perf_counter()
    command = [python, "-m", "rag_posfix.cli.main", "index", str(files), "--out", str(index), "--json"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL, cwd=files)
        _, status, used = os.wait4(process.pid, 0)  # which tells what this process used
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - started
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
        output.seek(0)
        printed = json.load(output)
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": used.ru_maxrss // 2**10,
        "passages": printed["passages"],
        "added": printed["added"],
    }


def index_and_update(files: Path, index: Path, python: str) -> dict[str, dict[str, float]]:
    """Time an index of ``files``, and another after a section was added to the first Markdown file."""
    measured = {"first": timed_index(files, index, python)}
    first = next(files.rglob("*.md"))
    text = first.read_text("utf-8")
    first.write_text(f"{text}\n# One more\n\nA new section.\n", "utf-8")
    measured["one file changed"] = timed_index(files, index, python)
    first.write_text(text, "utf-8")
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = study_options("index_files", __doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--python", default=None, help="also time the rag_posfix of this interpreter")
    chosen = parser.parse_args(arguments)
    other: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_variants(folder / "files", chosen.files)
        if chosen.python is not None:
            other = {"other": index_and_update(folder / "files", folder / "other", chosen.python)}
        summary = index_and_update(folder / "files", folder / "index", sys.executable)
    write_study(chosen, "index-files", summary, settings={"files": chosen.files}, **other)
    print(json.dumps({**other, "summary": summary}, indent=2))


if __name__ == "__main__":
    main()
