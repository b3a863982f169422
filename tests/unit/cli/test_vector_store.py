"""``--retriever KIND:key=value,...`` on the command line: passages of a store of another program, without an index."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rag_posfix.retrieval import external_stores
from tests.support.command_line import command_line
from tests.support.serving import BRIDGE, HARBOUR, QUESTION, ListRetriever
from tests.support.upstream import first_passage, upstream

SHELF = ("--retriever", "shelf:")


@pytest.fixture
def run(capsysbinary, monkeypatch):
    plugin = SimpleNamespace(name="shelf", load=lambda: lambda embeddings, **options: ListRetriever(BRIDGE, HARBOUR))
    monkeypatch.setattr(external_stores, "entry_points", lambda group: [plugin])
    return command_line(capsysbinary)


@pytest.mark.parametrize("command", ["ask", "prompt"])
def test_a_question_reads_passages_of_the_store(run, command: str):
    with upstream(first_passage) as server:
        options = ("--model", server.model, "--mitigation", "none", "--min-relevance", "off", "--json")
        code, out, err = run(command, QUESTION, *SHELF, *options)
    assert code == 0, err
    assert BRIDGE in out


def test_many_questions_read_passages_of_the_store(run, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": QUESTION}))
    files = ("--questions", tmp_path / "q.jsonl", "--out", tmp_path / "a.jsonl")
    with upstream(first_passage) as server:
        options = ("--model", server.model, "--mitigation", "none", "--min-relevance", "off", "--json")
        code, out, _ = run("ask", *files, *SHELF, *options)
    assert (code, json.loads(out)["failed"]) == (0, 0)
    assert BRIDGE in json.loads((tmp_path / "a.jsonl").read_text())["answer"]


@pytest.mark.slow
def test_measure_asks_with_passages_of_the_store_and_records_no_options_of_it(run, tmp_path):
    (tmp_path / "log.txt").write_text(f"{QUESTION}\nWhen did the harbour freeze?\n")
    store = ("--retriever", "shelf:key=hunter2")
    with upstream(first_passage) as server:
        options = ("--model", server.model, "--min-relevance", "off", "--out", tmp_path / "out", "--json")
        code, out, err = run("measure", "--questions", tmp_path / "log.txt", *store, *options)
    assert code == 0, err
    result = json.loads(out)
    assert result["n"] == 2
    assert " --retriever shelf:... " in json.loads(Path(result["record"]).read_text())["command"]
    assert not any("hunter2" in Path(result[file]).read_text() for file in ("record", "report", "profile"))


def test_measure_writes_no_questions_from_a_store(run, tmp_path):
    code, _, err = run("measure", *SHELF, "--out", tmp_path / "out")
    assert code == 1
    assert "--questions, with a vector store as --retriever" in " ".join(err.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "q.jsonl", "--questions", "log.txt"), "give one of three: --index"),
        (("--data", "q.jsonl", "--questions", "log.txt", "--passages", "p.jsonl"), "give one of three: --index"),
        (("--questions", "log.txt", "--passages", "p.jsonl"), "--passages 'p.jsonl' is read for --data alone"),
    ],
)
def test_measure_refuses_options_that_it_would_mix_or_ignore(run, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.txt").write_text(QUESTION)
    code, _, err = run("measure", *SHELF, *options, "--out", tmp_path / "out")
    assert code == 1
    assert message in " ".join(err.split())


@pytest.mark.parametrize("words", [("ask", "x"), ("prompt", "x"), ("measure", "--questions", "q", "--out", "out")])
def test_without_index_and_store_the_usage_names_both(run, words: tuple[str, ...]):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "--index" in err
    assert "--retriever" in err
