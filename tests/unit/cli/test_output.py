"""What commands print."""

import io
import json
import logging

import pytest
import typer
import typer.main
from rich.console import Console

from rag_posfix.cli.main import app, options
from rag_posfix.cli.options import SafeFormatter, emit_json, err, out, say, table
from rag_posfix.text import visible

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x9b31md\x7fe\u202ef\u2066g\rh"
"""Sets the title of the window, clears the screen, colours by C1, reverses, and writes over the line."""


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


def say_table(text):
    rows = table("file", title=text)
    rows.add_row(text)
    out().print(rows, markup=False)


def log(text):
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(SafeFormatter("%(message)s"))
    handler.handle(logging.makeLogRecord({"msg": text}))
    say(stream.getvalue())


@pytest.mark.parametrize(
    "show", [say, say_table, log, lambda text: err().print(text, markup=False), lambda text: emit_json({"text": text})]
)
def test_no_control_character_of_foreign_text_reaches_the_terminal(show, capsysbinary):
    show(HOSTILE)
    printed = capsysbinary.readouterr()
    text = (printed.out + printed.err).decode()
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\x7f", "\u202e", "\u2066", "\r"}
    assert "\\u001b" in text


def test_json_with_visible_controls_has_the_same_values(capsysbinary):
    emit_json({"text": HOSTILE})
    assert json.loads(capsysbinary.readouterr().out) == {"text": HOSTILE}


def test_lines_tabs_and_letters_of_any_script_are_printed_as_they_are():
    text = "one\ttwo\n\u05e9\u05dc\u05d5\u05dd \u0645\u0631 東京 é\n"
    assert visible(text) == text
    assert visible("one\r\ntwo") == "one\ntwo"


@pytest.mark.parametrize(("command", "is_warned"), [("ask", False), ("demo", False), ("eval", False), ("serve", True)])
def test_only_a_service_is_warned_that_answers_are_decoded_together(command, is_warned):
    logger = logging.getLogger("rag_posfix.generation.model.batch_invariance")
    with typer.Context(typer.main.get_command(app), info_name="rag-posfix") as context:
        context.invoked_subcommand = command
        options(context, verbose=False, version=False)
        assert logger.isEnabledFor(logging.WARNING) is is_warned
    assert logger.level == logging.NOTSET
