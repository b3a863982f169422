"""The options and the record of a program that measures once: ``--out``, its settings, the machine and its load."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_posfix.evaluation.record import environment, write_record

_LOAD_BEFORE = os.getloadavg()


def study_options(name: str, document: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program by its name and its docstring."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=str(document).splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="folder for the record")
    return parser


def write_study(
    chosen: argparse.Namespace,
    kind: str,
    summary: Any,
    rows: Sequence[Mapping[str, Any]] | None = None,
    **facts: Any,
) -> None:
    """Write the record to the folder ``chosen.out`` and say where; without a folder write none.

    Args:
        facts: Further entries of the head; ``settings`` in place of all options.
    """
    if chosen.out is None:
        return
    head = {
        "kind": kind, **environment(), "processor": platform.processor(),
        "load_average": {"before": _LOAD_BEFORE, "after": os.getloadavg()},
        "settings": {name: value for name, value in vars(chosen).items() if name != "out"}, **facts,
        "summary": summary,
    }  # fmt: skip
    print(write_record(chosen.out, kind, head, rows), file=sys.stderr)
