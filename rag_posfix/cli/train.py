"""``rag-posfix train``: training data, and fine-tuning against position bias."""

from __future__ import annotations

import typer

from rag_posfix.cli.train_data import data
from rag_posfix.cli.train_forgetting import forgetting
from rag_posfix.cli.train_model import block, distill, in2

app = typer.Typer(help="Make training data and fine-tune models against position bias.", no_args_is_help=True)
app.command("data")(data)
app.command("in2")(in2)
app.command("block")(block)
app.command("distill")(distill)
app.command("forgetting")(forgetting)


@app.callback()
def group() -> None:
    """Make training data and fine-tune models against position bias."""
