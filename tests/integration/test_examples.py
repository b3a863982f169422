"""The programs in examples/ run as printed, and print what they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.order_biased import OrderBiasedGenerator
from tests.support.serving import make_pipeline, serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "lost_in_the_middle.ipynb"

RUN = """
import runpy, sys, warnings
warnings.simplefilter("error", ResourceWarning)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
RUN_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
(parameters,) = [cell for cell in notebook.cells if cell.source.startswith("QUESTIONS = ")]
parameters.source += "\\nQUESTIONS, PASSAGES = 1, 3"
(loads,) = [cell for cell in notebook.cells if "load_engine()" in cell.source]
loads.source = loads.source.replace("load_engine()", f"load_engine({sys.argv[2]!r})")
NotebookClient(notebook, timeout=250, kernel_name="python3").execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
shown = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
print(json.dumps({"text": shown, "kinds": sorted({kind for output in outputs for kind in output.get("data", {})})}))
"""


@pytest.fixture
def run(python, tmp_path):
    """Run a program in a process and a folder of its own; return the lines that it printed."""

    def call(program, *arguments, **environment):
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}"}
        printed = python.run(tmp_path, "-c", program, *arguments, environment={**os.environ, **paths, **environment})
        assert "ResourceWarning" not in printed
        return printed.splitlines()

    return call


def test_every_example_is_run_here_and_listed_in_the_readme():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert names == {"faiss_app.py", "service_client.py", "own_method.py", "own_data.py", NOTEBOOK.name}
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"[{name}]({name})" in listed for name in names)


@pytest.mark.weights
def test_the_faiss_application_answers_and_names_its_sources(run):
    lines = run(RUN, EXAMPLES / "faiss_app.py", RAG_POSFIX_CACHE_DISK_BYTES="0")
    (answer,) = [number for number, line in enumerate(lines) if "Ilse Korvanth" in line][:1]
    first = lines[answer + 1]
    assert first.startswith("maravel")
    assert first.endswith("The Maravel lighthouse was designed by Ilse Korvanth and first lit in 1871.")


def test_a_method_of_the_application_gives_one_answer_for_both_orders(run, tiny_model):
    lines = run(RUN, EXAMPLES / "own_method.py", RAG_POSFIX_MODEL=str(tiny_model), RAG_POSFIX_MAX_TOKENS="8")
    none, own = lines.index("none"), lines.index("best_last")
    assert lines[none + 1] != lines[none + 2]
    assert lines[own + 1] == lines[own + 2] != ""


def test_own_data_is_measured_by_position_and_measured_answers_are_kept(capsys, tmp_path, monkeypatch, tiny_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAG_POSFIX_MODEL", str(tiny_model))
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


def test_the_client_gets_the_same_answer_for_both_orders(run):
    with closing(make_pipeline(OrderBiasedGenerator())) as pipeline, serving(pipeline) as url:
        first, second, verdict = run(RUN, EXAMPLES / "service_client.py", url)
    assert "Ilse Korvanth" in first
    assert first == second
    assert verdict == "the same answer for both orders: True"


def test_the_notebook_is_kept_without_outputs_because_they_would_go_stale():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_notebook_runs_draws_its_curve_and_shows_one_answer_under_the_method(run, tiny_model):
    found = json.loads(run(RUN_NOTEBOOK, NOTEBOOK, tiny_model)[-1])
    assert "difference between positions: 0.0" in found["text"]
    assert "image/png" in found["kinds"]
    shown = re.findall(r"gold position \d: (['\"].*)", found["text"].rpartition("\ncontext_experts\n")[2])
    assert (len(shown), len(set(shown))) == (3, 1)
