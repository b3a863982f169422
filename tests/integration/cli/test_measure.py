"""``measure``, ``report`` and ``data check`` on a real index and a server of another process's format."""

from __future__ import annotations

import html
import json
import re
import shlex
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from rag_posfix.demo_data import load_passages, load_questions
from rag_posfix.evaluation.record import read_record
from tests.support.redis_server import free_port
from tests.support.subprocesses import wait_until_ready
from tests.support.upstream import first_passage, upstream

ROOT = Path(__file__).parents[3]
QUESTIONS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An index of twelve passages, and as many questions."""
    folder = tmp_path_factory.mktemp("measured")
    rows = [{"id": d.id, "text": d.page_content, "title": d.metadata["title"]} for d in load_passages()[:12]]
    (folder / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "log.txt").write_text("".join(f"{question.question}\n" for question in load_questions()[:QUESTIONS]))
    return folder


@pytest.fixture
def index(folder, run):
    if not (folder / "index").is_dir():
        assert run("index", folder / "passages.jsonl", "--out", folder / "index").code == 0
    return folder / "index"


def arguments(folder, index, model, out):
    questions = ("--questions", folder / "log.txt")
    return (
        "measure",
        "--index",
        index,
        *questions,
        "--model",
        model,
        "--min-relevance",
        "off",
        "--k",
        4,
        "--out",
        out,
    )


@contextmanager
def service(python, index, model, profile, log):
    """A service with a profile: its process and port."""
    port = str(free_port())
    words = ("serve", "--index", index, "--model", model, "--profile", profile, "--port", port)
    process = python.start(ROOT, "-m", "rag_posfix.cli.main", *words, output=log)
    try:
        yield process, port
    finally:
        process.terminate()


def served_answer(port, **posfix):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Who designed the Maravel lighthouse?"}],
        "posfix": {"min_relevance": "off", **posfix},
    }
    response = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.slow
def test_a_remote_model_is_measured_and_its_profile_is_used(run, folder, tiny, tmp_path):
    index = tmp_path / "index"
    assert run("index", folder / "passages.jsonl", "--out", index).code == 0
    with upstream(first_passage) as server:
        words = [*map(str, arguments(folder, index, server.model, tmp_path / "out & <answers>")), "--json"]
        result = run(*words).json
        assert set(result) >= {
            "verdict", "flips", "chosen", "measured", "n", "kept", "dropped", "report", "profile", "record",
        }  # fmt: skip
        assert result["n"] == QUESTIONS
        assert set(result["flips"]) >= {"rate", "control", "interval"}
        assert result["flips"]["rate"] > 0.8
        assert result["flips"]["control"] == 0.0
        assert result["order_matters"] is True
        assert "default" not in result["measured"]
        profile = result["profile"]
        asked = run("ask", "Who?", "--index", index, "--model", server.model, "--profile", profile, "--json").json
        assert asked["mitigation"] == "none"
    page = run("report", result["record"], "--out", tmp_path / "page.html")
    assert page.code == 0
    for file in (tmp_path / "page.html", Path(result["report"])):
        (command,) = re.findall(r'<pre class="command">(.*?)</pre>', file.read_text())
        assert shlex.split(html.unescape(command)) == ["rag-posfix", *words]
    # Vega's script knows such addresses, and the policy of the page allows them for images; its own text has none.
    text = re.sub(r"<script>.*?</script>", "", (tmp_path / "page.html").read_text(), flags=re.DOTALL)
    assert "data:" not in text.replace("img-src data:;", "")
    assert (tmp_path / "page.csv").read_text().startswith("model,arrangement,worst,")
    with upstream(first_passage) as other:
        refused = run("ask", "Who?", "--index", index, "--model", other.model, "--profile", profile, "--json")
        assert "measured on" in refused.error["message"]


@pytest.mark.slow
@pytest.mark.weights
def test_a_service_answers_by_its_profile_and_refuses_that_of_another_model(run, folder, index, tmp_path, python):
    with upstream(first_passage) as server, upstream(first_passage) as other:
        result = run(*arguments(folder, index, server.model, tmp_path / "out"), "--limit", 2, "--json").json
        path = Path(result["profile"])
        profile = json.loads(path.read_text())
        path.write_text(json.dumps({**profile, "arrangement": {**profile["arrangement"], "order": "reverse"}}))
        told = tmp_path / "told"
        with (
            service(python, index, other.model, path, told) as (refused, _),
            service(python, index, server.model, path, tmp_path / "log") as (process, port),
        ):
            wait_until_ready(process, port, 240)
            for posfix in ({"mitigation": "auto"}, {}):
                answer = served_answer(port, **posfix)
                assert (answer["mitigation"], answer["order"]) == ("none", "reverse")
            named = served_answer(port, mitigation="none", order="ends_first")
            assert (named["mitigation"], named["order"]) == ("none", "ends_first")
            assert refused.wait(120) != 0
            assert "the profile was measured on" in told.read_text()


@pytest.mark.slow
@pytest.mark.weights
def test_questions_are_written_from_the_index_by_the_packaged_model_and_measured(run, index, tmp_path):
    out = tmp_path / "out"
    few = ("--documents", 2, "--limit", 1, "--max-tokens", 4, "--minutes", 0.1)
    result = run("measure", "--index", index, *few, "--out", out, "--json").json
    assert result["labels"] is True
    assert set(result["positions"]["none"]) == {"0", "1"}
    record = read_record(out / "record.json")
    assert record.head["data"]["name"].startswith("written from the index")
    rows = record.rows
    asked = {row["asked"] for row in rows}
    assert len(asked) == 1
    accepted = {row["asked"]: row["accepted"][0] for row in rows if row["table"] == "positions"}
    passages = {passage.id: passage.page_content for passage in load_passages()}
    golds = {row["asked"]: row["passages"][0] for row in rows if row.get("condition") == "gold_only"}
    assert all(accepted[question] in passages[gold] for question, gold in golds.items())
    assert {path.suffix for path in out.glob("report*")} >= {".html", ".csv", ".tex", ".svg"}


def test_usage_errors_name_both_ways(run, folder, tmp_path):
    result = run("measure", "--out", tmp_path, "--json")
    assert "--index" in result.error["message"]
    assert "--data" in result.error["message"]


def test_data_check_names_rows_and_exits_with_1(run, folder, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "Who?", "answers": ["x"], "passage": "nowhere"}\n')
    result = run("data", "check", tmp_path / "q.jsonl", "--passages", folder / "passages.jsonl", "--json")
    assert result.code == 1
    assert result.json["usable"] == 0
    assert result.json["problems"][0]["row"] == 1
