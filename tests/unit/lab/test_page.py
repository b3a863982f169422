"""The page about the laboratory: its example runs, its commands are valid, and its tables name everything."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from rag_posfix.cli.main import app
from rag_posfix.contracts.method_spec import parse_method, split_outside
from rag_posfix.lab.encodings import ENCODINGS, DecoderShape
from rag_posfix.lab.tasks import TASKS
from tests.support.pages import DOCS, examples

PAGE = (DOCS / "laboratory.md").read_text("utf-8")
COMMANDS = re.findall(r"^rag-posfix lab run .*$", PAGE, re.MULTILINE)


def test_the_example_prints_what_the_page_says():
    ((code, expected),) = examples("laboratory.md")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "laboratory.md", "exec"), {})
    assert printed.getvalue() == expected


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_tasks_encodings_and_options_that_exist(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prose.txt").write_text("The words of the text that a command above makes.\n" * 1000, "utf-8")
    command = typer.main.get_command(app).commands["lab"].commands["run"]
    _, _, _, task, *rest = shlex.split(line)
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options
    shape = DecoderShape(TASKS.create(parse_method(task, "task", "a=1")).vocabulary)
    for part in split_outside(rest[rest.index("--encoding") + 1], ","):
        assert ENCODINGS.create(parse_method(part, "encoding", "a=1")).build(shape) is not None
    assert "--out" in rest


def test_there_is_a_command_for_each_task_of_the_published_ordering():
    tasks = {TASKS.resolve(line.split()[3].split(":")[0]) for line in COMMANDS}
    assert tasks >= {"flip_flop", "selective_copy", "counting", "language"}


def rows(first_column):
    """Return the cells of the table of the page whose first heading is ``first_column``, by the name of the row."""
    table = PAGE.split(f"| {first_column} |")[1].split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {cells[0].strip("`"): cells[1:] for cells in found}


def test_the_tables_name_every_encoding_with_its_parameters_and_memory_and_every_task():
    encodings = rows("encoding")
    assert set(encodings) == set(ENCODINGS.names())
    for name, (_, parameters, memory) in encodings.items():
        assert re.findall(r"`(\w+)`", parameters) == list(ENCODINGS.parameters(name)), name
        assert memory == (ENCODINGS.get(name).memory if ENCODINGS.get(name).causal else "not for `lab run`")
    tasks = rows("task")
    assert set(tasks) == set(TASKS.names())
    for name, (_, out_of_distribution) in tasks.items():
        splits = list(TASKS.get(name)().splits)[1:]
        assert re.findall(r"`(\w+)`", out_of_distribution) == splits, name
