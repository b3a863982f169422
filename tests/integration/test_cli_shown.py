"""What commands print for people: help, descriptions, sources, several questions."""

from __future__ import annotations

import io
import json

import pytest
import typer

from rag_posfix.cli.main import app
from rag_posfix.cli.options import gold_positions_of
from rag_posfix.settings import Settings
from tests.support.command_line import cache_with_models, command_line


@pytest.fixture
def run(capsysbinary, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(cache_with_models(tmp_path_factory.mktemp("cache"))))
    return command_line(capsysbinary)


@pytest.mark.parametrize("command", [["ask"], ["eval", "positions"], ["models", "fetch"], []])
def test_h_is_help(run, command):
    assert run(*command, "-h") == run(*command, "--help")
    assert run(*command, "-h")[0] == 0


def test_help_shows_the_defaults_of_the_settings(run):
    shown = "".join(run("ask", "--help")[1].replace("│", " ").split())
    for name in ("mitigation", "order", "k", "retriever", "max_tokens", "model", "device", "reranker"):
        default = Settings.model_fields[name].default
        assert f"[default:{'none' if default is None else default}" in shown


def options_of(command, path=()):
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield " ".join((*path, parameter.opts[0])), parameter
    for name, part in getattr(command, "commands", {}).items():
        yield from options_of(part, (*path, name))


def test_help_shows_what_every_option_is_without_a_value():
    """A flag that is off is plain; the default of any other option must be stated."""
    options = dict(options_of(typer.main.get_command(app)))
    assert len(options) > 80
    silent = [
        name
        for name, one in options.items()
        if not (one.required or one.is_flag or isinstance(one.show_default, str) or one.default is not None)
    ]
    assert silent == []


def test_help_starts_with_at_most_sixty_characters():
    """Of commands and of options; those of probes and training are the docstrings of their classes."""

    def commands_of(command, path=()):
        yield path, command
        for name, part in getattr(command, "commands", {}).items():
            yield from commands_of(part, (*path, name))

    texts = {}
    for path, command in commands_of(typer.main.get_command(app)):
        if path[:1] != ("probe",) or path == ("probe",):
            texts[path] = (command.help or "").split("\n\n")[0]
        if path[:1] not in (("probe",), ("train",)):
            options = [parameter for parameter in command.params if parameter.name != "show_completion"]  # typer's own
            texts |= {(*path, parameter.name): getattr(parameter, "help", "") for parameter in options}
    assert len(texts) > 150
    assert {path: text for path, text in texts.items() if not text or len(text) > 60} == {}


@pytest.mark.parametrize(
    ("name", "first_line"),
    [
        ("ends_first", "ends_first (order)"),
        ("attnrank", "profile (order)"),
        ("likelihood", "likelihood (reranker)"),
        ("longllmlingua", "likelihood (reranker)"),
        ("bm25", "bm25 (first stage)"),
        ("hybrid", "hybrid (first stage)"),
    ],
)
@pytest.mark.slow
def test_methods_describes_orders_rerankers_and_first_stages(run, name, first_line):
    code, out, _ = run("methods", name)
    lines = out.splitlines()
    assert (code, lines[0]) == (0, first_line)
    assert len(lines[2]) > 20
    (found,) = json.loads(run("methods", name, "--json")[1])["found"]
    assert f"{found['name']} ({found['kind']})" == first_line
    assert found["description"]


@pytest.mark.parametrize(
    ("documents", "places"), [(10, [0, 4, 9]), (5, [0, 2, 4]), (20, [0, 9, 19]), (2, [0, 1]), (1, [0])]
)
def test_default_places_follow_the_number_of_passages(documents, places):
    assert gold_positions_of(None, documents) == places
    assert gold_positions_of("3,1", documents) == [3, 1]


def test_a_question_is_needed_without_chat(run, tmp_path):
    code, _, err = run("ask", "--index", tmp_path)
    assert (code, "give a question, or --chat" in " ".join(err.replace("│", " ").split())) == (2, True)


class TestSources:
    @pytest.fixture
    def index(self, run, tmp_path):
        folder = tmp_path / "a folder with a name that is long enough to be cut in a table of eighty characters"
        folder.mkdir()
        for number in range(7):
            (folder / f"{number}.txt").write_text(f"The lighthouse number {number} was built by Ilse {number}.")
        assert run("index", folder, "--out", tmp_path / "my.index")[0] == 0
        return tmp_path / "my.index"

    def test_sources_are_numbered_and_have_their_file_and_the_sentence_of_the_answer(
        self, run, tiny, index, monkeypatch
    ):
        monkeypatch.setenv("COLUMNS", "40")
        question = ["ask", "Who built lighthouse 3?", "--index", index, "--max-tokens", "2"]
        lines = run(*question)[1].splitlines()
        found = json.loads(run(*question, "--json")[1])["documents"]
        for number, document in enumerate(found[:5]):
            assert lines[1 + 2 * number] == f"[{number + 1}] {document['source']}"
            assert lines[2 + 2 * number] == f"    {document['text']}"
            assert document["text"].startswith("The lighthouse number")
            assert document["id"] not in "".join(lines)
        assert lines[11] == "and 2 more; --json lists all"

    def test_chat_loads_once_and_answers_every_line(self, run, tiny, index, monkeypatch):
        import rag_posfix.pipeline.build as build

        loads = []
        load = build.load_engine
        monkeypatch.setattr(build, "load_engine", lambda *given, **options: loads.append(1) or load(*given, **options))
        monkeypatch.setattr(
            "sys.stdin", io.StringIO("Who built lighthouse 1?\nWho built lighthouse 2?\n\nnot asked\n")
        )
        code, out, _ = run("ask", "--index", index, "--chat", "--max-tokens", "2")
        assert (code, out.count("[1] "), len(loads)) == (0, 2, 1)
        assert "searched for: Who built lighthouse 1? / Who built lighthouse 2?" in out

    @pytest.mark.slow
    @pytest.mark.weights
    def test_a_question_that_no_passage_is_about_is_told(self, run, index):
        asked = ["--index", index, "--max-tokens", "2"]
        code, out, _ = run("ask", "How do I bake bread?", *asked)
        assert code == 3
        assert out.splitlines()[0] == "No passage was found that answers this question."
        assert "no retrieved passage is about the question" in out
        assert "the best that was left out is" in out
        assert "--min-relevance off" in out
        assert run("ask", "How do I bake bread?", *asked, "--min-relevance", "off")[0] == 0
        code, out, _ = run("ask", "Who built lighthouse 3?", *asked)
        assert (code, "no retrieved passage" in out) == (0, False)
