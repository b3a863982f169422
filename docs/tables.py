"""Fills the tables of hand-written pages from the heads of records.

A table stands between ``<!-- table: RECORD... [as LAYOUT] -->`` and ``<!-- end of table -->``; records are named
without folder and ending. What else a page says is left alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.keep_record import RESULTS
from benchmarks.tables import table_of

MARKED = re.compile(r"(<!-- table: ([^>]+?) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def fill_tables(text: str, results: Path = RESULTS) -> str:
    """Return a page with what stands between the marks of its tables replaced.

    Raises:
        EvaluationError: a record is missing, or its table cannot be made.
    """
    return MARKED.sub(lambda found: f"{found[1]}{table_of(found[2].split(), results)}\n{found[4]}", text)
