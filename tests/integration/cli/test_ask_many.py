"""``ask --questions``: many questions at once, resumable."""

from __future__ import annotations

import json

import pytest

QUESTIONS = [
    {"id": "a", "question": "Who designed the Maravel lighthouse?"},
    {"question": "How long is the Ostrel bridge?"},
    {"id": "c", "question": "Where is rye bread from?", "filter": {"nowhere": 1}},
]


@pytest.fixture
def index(tiny_index):
    return tiny_index


@pytest.fixture
def ask(run, index, tmp_path):
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n\n")
    files = ["--questions", tmp_path / "q.jsonl", "--out", tmp_path / "a.jsonl"]
    return lambda *options: run("ask", "--index", index, *map(str, files), "--max-tokens", "6", "--no-cache", *options)


def rows(path):
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_each_question_has_a_line_and_a_second_run_asks_what_is_missing(ask, run, index, tmp_path):
    result = ask("--json")
    assert (result.code, result.json) == (0, {"questions": 3, "skipped": 0, "failed": 0})
    assert "3 of 3: answered, 0 s left" in result.err
    answers = rows(tmp_path / "a.jsonl")
    assert set(answers) == {"a", "2", "c"}
    assert (answers["c"]["grounded"], answers["2"]["question"]) == (False, QUESTIONS[1]["question"])
    alone = run("ask", QUESTIONS[0]["question"], "--index", index, "--max-tokens", "6", "--no-cache", "--json").json
    assert answers["a"]["answer"] == alone["answer"]

    lines = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text(lines[0] + lines[1][:40])  # as a killed run leaves it
    assert ask("--json").json == {"questions": 3, "skipped": 1, "failed": 0}
    again = rows(tmp_path / "a.jsonl")
    assert {key: row["answer"] for key, row in again.items()} == {key: row["answer"] for key, row in answers.items()}


def test_a_question_that_fails_has_a_line_until_it_is_asked_again(ask, tmp_path):
    long = {"id": "long", "question": "Why? " * 5000}
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [long, QUESTIONS[0]])))
    result = ask()
    assert (result.code, result.out.strip()) == (1, "2 questions, 0 skipped, 1 failed")
    answers = rows(tmp_path / "a.jsonl")
    assert (answers["long"]["type"], "answer" in answers["a"]) == ("PromptTooLongError", True)
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [{**QUESTIONS[1], "id": "long"}, QUESTIONS[0]])))
    assert ask("--json").json == {"questions": 2, "skipped": 1, "failed": 0}  # what failed is asked again
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 2


def test_wrong_files_and_options_that_do_not_go_together_are_refused(ask, run, index, tmp_path):
    (tmp_path / "q.jsonl").write_text('"Who?"\n{"text": "Who?"}')
    assert "line 2: must be a text or an object" in ask("--json").error["message"]
    (tmp_path / "q.jsonl").write_text('{"id": "a", "question": "Who?"}\n')
    (tmp_path / "a.jsonl").write_text('{"id": "a", "question": "Another?"}\n')
    assert "another question under the id 'a'" in ask("--json").error["message"]
    assert "leave out QUESTION" in ask("Who?", "--json").error["message"]
    error = run("ask", "--index", index, "--questions", "q", "--json").error
    assert "--questions and --out belong together" in error["message"]
