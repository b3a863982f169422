"""``rag-posfix``: the entry point, its commands, and how errors are printed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer

from rag_posfix import __version__
from rag_posfix.cli import (
    ask,
    bench,
    cache,
    demo,
    evaluate,
    index,
    keys,
    lab,
    methods,
    models,
    probe,
    serve,
    train,
    verify,
)
from rag_posfix.cli.output import emit_json, err
from rag_posfix.errors import RagPosfixError
from rag_posfix.settings import limit_openmp_spinning
from rag_posfix.text import clean_text

_INTERRUPTED = 130

app = typer.Typer(
    name="rag-posfix",
    help="Retrieval-augmented generation whose answers do not depend on the order of the passages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("demo")(demo.demo)
app.command("index")(index.index)
app.command("ask")(ask.ask)
app.command("methods")(methods.methods)
app.command("verify")(verify.verify)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.add_typer(evaluate.app, name="eval")
app.add_typer(probe.app, name="probe")
app.add_typer(lab.app, name="lab")
app.add_typer(train.app, name="train")
app.add_typer(cache.app, name="cache")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Write log messages of level INFO to stderr."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Retrieval-augmented generation whose answers do not depend on the order of the passages."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with 0 (success), 1 (error), 2 (wrong usage) or 130 (interrupted).

    A ``RagPosfixError`` is printed as one line on stderr, and with ``--json`` also as ``{"error": {"type",
    "message"}}`` on stdout. Other exceptions have a traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    limit_openmp_spinning()
    try:
        app(args=given)
    except RagPosfixError as error:
        message = clean_text(" ".join(str(error).split()))  # names of files need not be Unicode
        if "--json" in given:
            emit_json({"error": {"type": type(error).__name__, "message": message}})
        err().print(f"[bold red]error:[/bold red] {_escape(message)}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
    except SystemExit as stopped:
        if stopped.code == _INTERRUPTED:
            err().print(_escape(_interruption(stopped)), highlight=False, soft_wrap=True)
        raise


def _interruption(error: BaseException) -> str:
    """Return what the command says about being interrupted; typer turns KeyboardInterrupt into an exit."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, KeyboardInterrupt) and found.args:
            return str(found)
        found = found.__cause__ or found.__context__
    return "interrupted; what was finished before is kept, and the same command starts again"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
