"""Help is readable at 80 columns: nothing is cut, text is below its option, examples are last and work."""

import shlex

import pytest
import typer
from typer.testing import CliRunner

from rag_posfix.cli.help import EXAMPLES, WIDTH
from rag_posfix.cli.main import app


def commands(command, path=("rag-posfix",), parent=None):
    context = command.make_context(path[-1], [], parent=parent, resilient_parsing=True)
    yield path, command, context
    for name in getattr(command, "commands", {}):
        yield from commands(command.commands[name], (*path, name), context)


HELP = {
    " ".join(path): (command, context.get_help()) for path, command, context in commands(typer.main.get_command(app))
}


TYPERS = ("install_completion", "show_completion")


@pytest.mark.parametrize("path", HELP)
def test_no_line_is_too_long_and_no_word_is_cut(path):
    command, text = HELP[path]
    lines = text.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert "…" not in text
    assert not {"│", "╭"} & set(text)
    words = set(text.replace("[", " ").replace("]", " ").replace(",", " ").replace(";", " ").split())
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or words.issuperset(parameter.opts)
        for word in (getattr(parameter, "help", None) or "").replace(",", " ").replace(";", " ").split():
            assert word.strip("[]") in words, f"{word!r} of {parameter.opts} is cut"
        shown = getattr(parameter, "show_default", None)
        if isinstance(shown, str):
            assert " ".join(shown.split()) in " ".join(text.split()), f"the default of {parameter.opts} is cut"


@pytest.mark.parametrize("path", HELP)
def test_text_is_below_its_option_and_indented(path):
    command, text = HELP[path]
    lines = text.splitlines()
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.help:
            (number,) = [
                n for n, line in enumerate(lines) if parameter.opts[0] in line.replace(",", " ").split()[:1]
            ] or [
                n
                for n, line in enumerate(lines)
                if line.startswith("  -") and parameter.opts[0] in line.replace(",", " ")
            ][:1]
            assert lines[number + 1].startswith("      " + parameter.help.split()[0])


def test_options_are_in_groups_and_examples_are_last():
    text = HELP["rag-posfix ask"][1]
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments:", "Options:", "Data:", "Method:", "Model:", "Output:", "Running:", "Examples:"]
    assert text.index("--mitigation") < text.index("Correct with this method") < text.index("--reranker")


def test_every_example_is_a_command_with_its_options():
    known = {path: command for path, (command, _) in HELP.items()}
    shown = "\n".join(text for _, text in HELP.values())
    for example in [line for lines in EXAMPLES.values() for line in lines]:
        assert f"  {example}\n" in shown + "\n"
        words = shlex.split(example)
        path = max((path for path in known if example.startswith(path)), key=len)
        options = {option for parameter in known[path].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
        required = [p.opts for p in known[path].params if p.required and p.param_type_name == "option"]
        assert all(set(names) & set(words) for names in required), f"{example} lacks one of {required}"


@pytest.mark.parametrize("path", HELP)
def test_a_command_and_an_option_are_described_in_about_60_characters(path):
    command, _ = HELP[path]
    texts = [(command.help or "").split("\n\n")[0]]
    texts += [getattr(parameter, "help", None) or "" for parameter in command.params if parameter.name not in TYPERS]
    assert [text for text in texts if len(" ".join(text.split())) > 66] == []


def test_the_shell_completes_commands_and_options():
    def complete(line):
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_RAG_POSFIX_COMPLETE": "complete_bash"}
        return CliRunner().invoke(app, env=words, prog_name="rag-posfix").output.split()

    assert complete("rag-posfix eval pos") == ["positions"]
    assert complete("rag-posfix ask --allow") == ["--allow-ungrounded", "--allow-unsupported"]
