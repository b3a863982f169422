"""Times the first index of many files, and an update of it: ``python -m benchmarks.index_files [--files 1000]``.

The files are variants of those of the end-to-end gate, without the manual, each paragraph with its own number. Timed
is ``rag-posfix index``, in a process of its own, with wall-clock and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.end_to_end.files import CORPUS
from rag_posfix.evaluation.record import environment, write_record

_TEXT = (".md", ".txt", ".html")


def write_variants(folder: Path, count: int) -> None:
    """Write ``count`` files with different content."""
    sources = [path for path in sorted(CORPUS.rglob("*")) if path.suffix in _TEXT and path.parent.name != "made"]
    for number in range(count):
        source = sources[number % len(sources)]
        target = folder / f"{number // 100:02}" / f"{source.stem}-{number}{source.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(re.sub(rb"\n\n(?=[A-Z])", f"\n\nThis is copy {number}. ".encode(), source.read_bytes()))


def timed_index(files: Path, index: Path) -> dict[str, float]:
    """Return wall-clock and CPU seconds of ``rag-posfix index``, and the numbers that it prints."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "rag_posfix.cli.main", "index", str(files), "--out", str(index), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = json.loads(done.stdout)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(cpu, 1),
        "passages": printed["passages"],
        "added": printed["added"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.index_files", description=str(__doc__).splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_variants(folder / "files", chosen.files)
        summary = {"first": timed_index(folder / "files", folder / "index")}
        first = next((folder / "files").rglob("*.md"))
        first.write_text(f"{first.read_text('utf-8')}\n# One more\n\nA new section.\n", "utf-8")
        summary["one file changed"] = timed_index(folder / "files", folder / "index")
    head = {"kind": "index-files", **environment(), "files": chosen.files, "summary": summary}
    if chosen.out is not None:
        write_record(chosen.out, "index-files", head, None)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
