"""``rag-posfix train``: training data, and fine-tuning against position bias."""

from __future__ import annotations

import typer

from rag_posfix.cli.train_data import data

__all__ = ["app"]

app = typer.Typer(help="Make training data and fine-tune models against position bias.", no_args_is_help=True)
app.command("data")(data)


@app.callback()
def group() -> None:
    """Make training data and fine-tune models against position bias."""
