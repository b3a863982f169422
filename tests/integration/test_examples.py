"""The programs in examples/ run as printed, and print what they promise."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rag_posfix import build_pipeline
from tests.support.serving import serving

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOK = EXAMPLES / "lost_in_the_middle.ipynb"

RUN_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
(parameters,) = [cell for cell in notebook.cells if cell.source.startswith("QUESTIONS = ")]
parameters.source += "\\nQUESTIONS, PASSAGES = 1, 3"
NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
shown = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
print(json.dumps({"text": shown, "kinds": sorted({kind for output in outputs for kind in output.get("data", {})})}))
"""


def run(*arguments, **environment):
    """Run Python as a user does, with settings of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here_and_listed_in_the_readme():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert names == {"faiss_app.py", "service_client.py", "own_method.py", "own_data.py", NOTEBOOK.name}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"[{name}]({name})" in listed for name in names)


@pytest.mark.weights
def test_the_faiss_application_answers_and_names_its_sources(tmp_path):
    printed = run("-W", "error::ResourceWarning", EXAMPLES / "faiss_app.py", RAG_POSFIX_CACHE_DISK_BYTES="0")
    assert "Ilse Korvanth" in printed.splitlines()[0]
    first = printed.splitlines()[1]
    assert first.startswith("maravel")
    assert first.endswith("The Maravel lighthouse was designed by Ilse Korvanth and first lit in 1871.")


@pytest.mark.weights
def test_a_method_of_the_application_gives_one_answer_for_both_orders():
    lines = run("-W", "error::ResourceWarning", EXAMPLES / "own_method.py").splitlines()
    assert (lines[0], lines[3]) == ("none", "best_last")
    assert lines[1] != lines[2]
    assert lines[4] == lines[5]
    assert "Jonas Aldring" in lines[4]


@pytest.mark.weights
def test_own_data_is_measured_by_position_and_measured_answers_are_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "own_data.py"), run_name="__main__")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines] == ["none", "default"]
    accuracies = lines[1].partition("gold passage first to last: ")[2].split(", ")
    assert (len(accuracies), len(set(accuracies))) == (3, 1)  # the same answers for every order
    assert " of " in printed.err
    journal = tmp_path / "own_data_results" / "positions-journal.jsonl"
    before = journal.read_bytes()
    runpy.run_path(str(EXAMPLES / "own_data.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == lines
    assert journal.read_bytes() == before


@pytest.mark.weights
def test_the_client_gets_the_same_answer_for_both_orders():
    with closing(build_pipeline()) as pipeline, serving(pipeline) as url:
        printed = run(EXAMPLES / "service_client.py", url)
    first, second, verdict = printed.splitlines()
    assert "Ilse Korvanth" in first
    assert first == second
    assert verdict == "the same answer for both orders: True"


def test_the_notebook_is_kept_without_outputs_because_they_would_go_stale():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.weights
def test_the_notebook_runs_draws_its_curve_and_shows_one_answer_under_the_method():
    found = json.loads(run("-c", RUN_NOTEBOOK, NOTEBOOK).splitlines()[-1])
    assert "difference between positions: 0.0" in found["text"]
    assert "image/png" in found["kinds"]
    assert found["text"].count("'The Maravel lighthouse was designed by Ilse Korvanth") >= 3
