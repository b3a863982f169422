"""The page about training: its commands are valid, and follow each other."""

from __future__ import annotations

import itertools
import re
import shlex

import click
import pytest
import typer.main

from rag_posfix.cli.main import app
from tests.support.pages import DOCS

PAGE = (DOCS / "training.md").read_text("utf-8")
COMMANDS = [shlex.split(line) for line in re.findall(r"^rag-posfix .*$", PAGE, re.MULTILINE)]
TUTORIAL = typer.main.get_command(app)


def found_command(words):
    """Return the command that ``words`` name, and what follows its name."""
    command, rest = TUTORIAL, [word for word in words[1:] if word != "-v"]
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    return command, rest


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_has_options_and_values_that_are_accepted(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, rest = found_command(words)
    with command.make_context(command.name, rest) as context:  # parses, and raises a usage error
        assert context.params


def test_each_file_of_the_tutorial_is_made_by_a_command_before_it():
    made = set()
    for words in COMMANDS:
        for option, value in itertools.pairwise(words):
            if option in ("--data", "--decontaminate", "--adapter"):
                assert value.split("/")[0] in made, value
        made |= {value for option, value in itertools.pairwise(words) if option == "--out"}
    assert {"unseen", "samples", "in2"} <= made


def test_all_commands_of_the_page_are_in_the_tutorial():
    tutorial = PAGE.partition("\n## Tutorial\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^rag-posfix .*$", tutorial, re.MULTILINE)
    assert lines[0].startswith("rag-posfix train data --pairs demo")
    assert lines[-1] == "rag-posfix demo --adapter in2/adapter"
    assert [shlex.split(line) for line in lines] == COMMANDS


def test_every_command_of_the_group_is_on_the_page():
    assert all(f"train {name}" in PAGE for name in TUTORIAL.commands["train"].commands)


def test_every_option_of_the_group_shows_its_default():
    for name, command in TUTORIAL.commands["train"].commands.items():
        shown = "".join(re.sub(r"[\s│]", "", command.get_help(click.Context(command, info_name=name))).split())
        for one in command.params:
            if isinstance(one, click.Option) and not (one.required or one.is_flag or one.name == "help"):
                default = one.show_default if isinstance(one.show_default, str) else one.default
                assert f"[default:{re.sub(r'[ ()]', '', str(default))}" in re.sub(r"[()]", "", shown), (name, one.name)
