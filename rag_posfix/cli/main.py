"""``rag-posfix``: the entry point, its commands, and how errors are printed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer

from rag_posfix import __version__
from rag_posfix.cli import ask, evaluate, index, lab, measure, methods, probe, serve, train
from rag_posfix.cli.help import make_readable
from rag_posfix.cli.options import Config, Plugin, SafeFormatter, emit_json, err
from rag_posfix.errors import RagPosfixError, missing_package
from rag_posfix.process import prepare_process, quiet_libraries
from rag_posfix.settings import config_file
from rag_posfix.text import clean_text

_INTERRUPTED = 130

app = typer.Typer(
    name="rag-posfix",
    help="Answer from documents, independently of their order.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("demo")(measure.demo)
app.command("index")(index.index)
app.command("ask")(ask.ask)
app.command("prompt")(ask.prompt)
app.command("methods")(methods.methods)
app.command("verify")(methods.verify)
app.command("serve")(serve.serve)
app.command("mcp")(serve.mcp)
app.command("measure")(measure.measure)
app.command("report")(measure.report)
app.command("bench")(evaluate.bench)
app.add_typer(evaluate.app, name="eval")
app.add_typer(measure.data, name="data")
app.add_typer(probe.app, name="probe")
app.add_typer(lab.app, name="lab")
app.add_typer(train.app, name="train")
app.add_typer(index.cache, name="cache")
app.add_typer(index.models, name="models")
app.add_typer(serve.keys, name="keys")
make_readable(app)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Config = None,
    plugin: Plugin = None,
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Log messages of level INFO to stderr."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Answer from documents, independently of their order."""
    level = logging.INFO if verbose else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if not verbose:
        quiet_libraries()
        if context.invoked_subcommand not in ("serve", "mcp"):
            rounding = logging.getLogger("rag_posfix.generation.model.batch_invariance")
            rounding.setLevel(logging.ERROR)  # of answers that are decoded together, which operators can change
            context.call_on_close(lambda: rounding.setLevel(logging.NOTSET))
    if config is None and (found := context.with_resource(config_file())) is not None:
        err().print(f"settings are read from {found}", markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with 0 (success), 1 (error), 2 (wrong usage), 3 (no passage) or 130 (interrupted).

    A ``RagPosfixError`` is printed as one line on stderr, and with ``--json`` also as ``{"error": {"type",
    "message"}}`` on stdout. Other exceptions have a traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_process()
    try:
        _run(words)
    except RagPosfixError as error:
        message = clean_text(" ".join(str(error).split()))  # names of files need not be Unicode
        err().print(f"[bold red]error:[/bold red] {_escape(message)}", highlight=False, soft_wrap=True)
        if "--json" in words:
            _emit_error(error, message)
        raise SystemExit(1) from None
    except SystemExit as exit_error:
        if exit_error.code == _INTERRUPTED:
            err().print(_escape(_interruption(exit_error)), highlight=False, soft_wrap=True)
        raise


def _emit_error(error: RagPosfixError, message: str) -> None:
    try:
        emit_json({"error": {"type": type(error).__name__, "message": message}})
    except BrokenPipeError:  # nobody reads; nor does the flush at the end of the process find a reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> None:
    try:
        app(args=words, obj=words)  # a command finds them in its context
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from error


def _interruption(error: BaseException) -> str:
    """Return the message of an interruption; typer turns KeyboardInterrupt into an exit."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt) and cause.args:
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return "interrupted; what was finished before is kept, and the same command starts again"


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
