"""``python -m benchmarks.gpu`` with tiny models on the CPU, where nothing is installed but what computing takes."""

import json
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import asks
from benchmarks.gpu.bench import Bench, Cell, Part, run_parts
from benchmarks.gpu.models import REAL, TINY
from tests.support.subprocesses import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("1-exactness", "2-first-token", "3-stores", "4-batches", "5-profile")

RUN = """
import runpy, sys

for name in "fastapi faiss langchain_core orjson pydantic pydantic_settings redis rich typer".split():
    sys.modules[name] = None
sys.argv = ["benchmarks.gpu", "--out", sys.argv[1], "--shape", "tiny"]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def bench():
    return Bench(TINY, torch.device("cpu"), torch.float32)


def run(parts, out, minutes=1.0):
    return run_parts(bench(), parts, out, minutes, lambda line: None)


def head_of(path):
    return json.loads(path.read_text())


def test_all_five_parts_write_their_records_and_the_asks_are_answered(tmp_path):
    shown = run_python(textwrap.dedent(RUN), tmp_path, cwd=ROOT)
    records = {name: head_of(tmp_path / f"{name}.json") for name in PARTS}
    assert all(record["complete"] and record["rows"] for record in records.values())
    assert not [row for record in records.values() for row in record["rows"] if "failed" in row]
    assert {"torch", "transformers", "numpy", "safetensors"} <= set(records["1-exactness"]["versions"])
    answered = head_of(tmp_path / "asks.json")["rows"]
    assert answered[0] == {"text": "share of exactness checks that pass = 1", "value": 1.0, "passed": True}
    assert all(row["value"] is not None for row in answered if "sorted_inter_document" not in row["text"])
    assert "what is asked" in shown


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path):
    def cut_off():
        raise KeyboardInterrupt

    part = Part("part", 1.0, lambda _: iter([Cell({"n": 1}, lambda: {"found": 2}), Cell({"n": 2}, cut_off)]))
    with pytest.raises(KeyboardInterrupt):
        run([part], tmp_path)
    record = head_of(tmp_path / "1-part.json")
    assert record["complete"] is False
    assert [(row["n"], row["found"]) for row in record["rows"]] == [(1, 2)]


def test_what_does_not_fit_into_the_time_is_left_out_and_said(tmp_path):
    part = Part("part", 1.0, lambda _: iter([Cell({"n": 1}, dict)]))
    assert run([part], tmp_path, minutes=0.0)["part"] == []
    assert head_of(tmp_path / "1-part.json")["complete"] is False


def test_one_cell_that_is_out_of_memory_or_broken_leaves_the_others(tmp_path):
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def broken():
        raise ValueError("no such kernel")

    cells = [Cell({}, too_large), Cell({}, broken), Cell({}, lambda: {"found": 1})]
    rows = run([Part("part", 1.0, lambda _: iter(cells))], tmp_path)["part"]
    assert rows[0]["out_of_memory"] is True
    assert rows[1]["failed"] == "ValueError: no such kernel"
    assert rows[2]["found"] == 1


def test_an_ask_that_was_not_measured_is_neither_passed_nor_failed():
    assert {ask.passed for ask in asks({}, REAL)} == {None}


def test_asks_compare_the_row_of_the_model_and_the_prompt_that_they_are_about():
    labels = {"model": "Llama-3.1-8B", "method": "inter_document"}
    rows = [{**labels, "size": "5x150", "cold_ratio": 9.0}, {**labels, "size": "20x500", "cold_ratio": 1.4}]
    (found,) = [ask for ask in asks({"first-token": rows}, REAL) if "cold inter_document" in ask.text]
    assert (found.value, found.passed) == (1.4, True)


@pytest.mark.parametrize(("index", "parameters"), [(0, 8_030_261_248), (2, 134_515_008), (4, 8_190_735_360)])
def test_models_have_the_number_of_parameters_of_the_published_ones(index, parameters):
    import transformers

    model = REAL.cells[index][0]
    config = getattr(transformers, f"{model.family}Config")(**model.config)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in made.parameters()) == parameters
