"""What commands print."""

import io

import pytest
from rich.console import Console

from rag_posfix.cli.output import table


@pytest.mark.parametrize("width", [24, 40, 200])
def test_a_name_in_a_table_is_never_cut(width):
    name = "context_experts:contrast=0.3:relevance=both"
    shown = table("method", "worst", title="results")
    shown.add_row(name, "-2.08 (0.12)")
    printed = io.StringIO()
    Console(file=printed, width=width).print(shown)
    assert "…" not in printed.getvalue()
    cells = [line.split("│")[1].strip() for line in printed.getvalue().splitlines() if line.startswith("│")]
    assert "".join(cells) == name
