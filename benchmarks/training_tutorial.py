"""How long the tutorial on training takes: ``python -m benchmarks.training_tutorial --out DIR``.

Runs the commands of the tutorial in docs/training.md, one after another, in an empty folder. The installation is not
part of it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rag_posfix.evaluation.record import environment, write_record

PAGE = Path(__file__).resolve().parents[1] / "docs" / "training.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.training_tutorial", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    given = parser.parse_args(arguments)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in tutorial_commands(PAGE.read_text("utf-8")):
            print(line, flush=True)
            started = time.perf_counter()
            program, *words = shlex.split(line)
            subprocess.run([Path(sys.executable).with_name(program), *words], cwd=folder, check=True)
            seconds[line] = round(time.perf_counter() - started, 1)
    summary = {"minutes": sum(seconds.values()) / 60, "seconds": seconds}
    head = {"kind": "training-tutorial", **environment(), "summary": summary}
    print(write_record(given.out, "training-tutorial", head))


def tutorial_commands(page: str) -> list[str]:
    """Return the commands of the section ``Tutorial`` of a page."""
    section = page.partition("\n## Tutorial\n")[2].partition("\n## ")[0]
    return re.findall(r"^rag-posfix .*$", section, re.MULTILINE)


if __name__ == "__main__":
    main()
