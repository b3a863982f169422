"""``--config``: before a command for every command, after it for those with settings, and the file of the folder."""

import json

import pytest

from tests.support.command_line import command_line

NO_CACHE = "[cache]\nenabled = false\n[passages]\nenabled = false\n"


@pytest.fixture
def run(capsysbinary, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(capsysbinary)


def message(result):
    code, out, _ = result
    assert code == 1
    return json.loads(out)["error"]["message"]


def test_a_command_reads_the_file_that_is_named_before_it_and_the_next_one_does_not(run, tmp_path):
    (tmp_path / "a.toml").write_text(NO_CACHE)
    assert "no cache outlives a process" in message(run("--config", "a.toml", "cache", "stats", "--json"))
    assert run("cache", "stats", "--json")[0] == 0


def test_a_command_with_settings_reads_the_file_that_is_named_after_it(run, tmp_path):
    (tmp_path / "a.toml").write_text("k = 0\n")
    asked = ["ask", "Who?", "--index", "x", "--json"]
    assert message(run(*asked, "--config", "a.toml")).startswith("a.toml: k=0 must be")
    assert message(run(*asked, "--config", "a.toml", "--k", "3")).startswith("there is no folder 'x'"), (
        "an option wins"
    )
    code, _, err = run("serve", "--config", "a.toml")
    assert (code, "a.toml: k=0 must be" in err) == (1, True)


def test_the_file_of_the_folder_is_read_unless_another_one_is_named(run, tmp_path):
    (tmp_path / "rag-posfix.toml").write_text("kk = 1\n")
    (tmp_path / "good.toml").write_text("k = 3\n")
    asked = ["ask", "Who?", "--index", "x", "--json"]
    code, out, err = run(*asked)
    assert message((code, out, err)) == ("rag-posfix.toml: kk is not a setting; did you mean k?; correct or remove it")
    assert err.startswith("settings are read from rag-posfix.toml\n"), "a file that nobody named is no surprise"
    assert message(run(*asked, "--config", "good.toml")).startswith("there is no folder 'x'")
    assert message(run("--config", "good.toml", *asked)).startswith("there is no folder 'x'")


def test_a_file_that_does_not_exist_is_refused_although_the_command_needs_no_setting(run):
    code, _, err = run("--config", "missing.toml", "methods")
    assert code == 1
    assert "the configuration file 'missing.toml' cannot be read (No such file or directory)" in err


def test_a_misspelled_variable_stops_a_command(run, monkeypatch):
    monkeypatch.setenv("RAG_POSFIX_MITIGATON", "none")
    told = message(run("cache", "stats", "--json"))
    assert told == ("RAG_POSFIX_MITIGATON is not a setting; did you mean RAG_POSFIX_MITIGATION?; correct or unset it")
