"""What every command has in common: methods, options, messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rag_posfix.assembly.orders import ORDERS

ROOT = Path(__file__).resolve().parents[3]


COMMANDS = """
import contextlib, io, json, os, sys
from rag_posfix.cli.main import main
results = []
for words, variables in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    os.environ.update(variables)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    for name in variables:
        del os.environ[name]
    results.append((code, out.getvalue(), err.getvalue(), sorted({"torch", "transformers"} & sys.modules.keys())))
print(json.dumps(results))
"""
WRONG_VALUES = [
    ("ask x --index {index} --device nope", {}, "device='nope' cannot be used"),
    ("ask x --index {folder}", {}, "no index in"),
    ("ask x --index {index} --mitigation nope", {}, "unknown mitigation 'nope'"),
    ("ask x --index {index} --max-tokens 8192", {}, "--max-tokens 8192 leaves no room"),
    ("ask x --index {index} --retriever nope", {}, "retriever='nope' must be auto, dense, bm25, hybrid"),
    ("ask x --index {index} --template nope", {}, "template='nope' is neither"),
    ("ask x --index {index} --profile nope", {}, "profile='nope' is not a file"),
    ("ask x --index {index} --adapter nope", {}, "adapter='nope' holds no adapter_config.json"),
    ("ask x --index {index}", {"RAG_POSFIX_K": "many"}, "RAG_POSFIX_K='many' must be a valid integer\n"),
    ("index {folder} --out {folder}/new", {}, "no documents in"),
    ("demo --mitigation nope", {}, "unknown mitigation 'nope'"),
    ("bench --mitigation nope", {}, "unknown mitigation 'nope'"),
    ("eval positions --data x --out y --mitigation nope", {}, "unknown mitigation 'nope'"),
    ("serve --index {folder}", {}, "no index in"),
    ("serve --host 0.0.0.0 --port 0", {}, "0.0.0.0 can be reached from other machines, and there is no API"),
    ("serve", {"RAG_POSFIX_SERVICE_PORT": "abc"}, "RAG_POSFIX_SERVICE_PORT='abc' must be a valid integer\n"),
]
"""Commands, variables of the environment, and a part of the message."""


@pytest.fixture(scope="module")
def early_ends(tmp_path_factory, index):
    """What each command of ``WRONG_VALUES`` and ``--help`` print in a process of their own, with what was imported."""
    folder = tmp_path_factory.mktemp("empty")
    commands = [
        ([word.format(index=index, folder=folder) for word in words.split()], variables)
        for words, variables in [("--help", {}), *(case[:2] for case in WRONG_VALUES)]
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], input=json.dumps(commands), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestMethods:
    def test_json_lists_everything_that_can_be_chosen(self, run):
        found = run("methods", "--json").json
        assert set(found) == {"mitigations", "orders", "rerankers", "first_stages", "plugins"}
        by_name = {one["name"]: one for one in found["mitigations"]}
        assert {"none", "context_experts", "parallel_windows"} <= set(by_name)
        assert {"ends_first", "original", "random", "relevance", "reverse"} <= set(found["orders"])
        assert {"cross_encoder", "embedding", "in_context", "likelihood", "listwise"} <= set(found["rerankers"])
        for one in by_name.values():
            assert {"paper", "order_invariant", "needs_calibration", "training_free", "parameters"} <= set(one)
        experts = by_name["context_experts"]
        assert experts["order_invariant"] is True
        assert by_name["none"]["order_invariant"] is False
        assert experts["parameters"]["answer_weight"]["default"] == 1.0

    def test_without_json_it_is_a_table(self, run):
        result = run("methods")
        assert result.code == 0
        assert "context_experts" in result.out
        shown = (f"{name} (attnrank)" if name == "profile" else name for name in ORDERS.names())
        assert f"orders: {', '.join(shown)}" in " ".join(result.out.split())

    @pytest.mark.parametrize(
        ("alias", "name"),
        [("pine", "inter_document"), ("rotor", "sorted_inter_document"), ("pcw", "parallel_windows")],
    )
    def test_the_names_of_papers_are_listed_and_find_their_method(self, run, alias, name):
        lines = [line.split("│")[1].strip() for line in run("methods").out.splitlines() if line.startswith("│")]
        assert lines[lines.index(name) + 1] == f"({alias})"
        (one,) = run("methods", alias, "--json").json["mitigations"]
        assert (one["name"], one["aliases"]) == (name, [alias])

    def test_one_method_is_shown_in_full(self, run):
        result = run("methods", "context_experts")
        assert result.code == 0
        for part in ("Source:", "Formula:", "Differs from the paper:", "Cost:", "Limits:"):
            assert part in result.out
        (one,) = run("methods", "context_experts", "--json").json["mitigations"]
        assert one["name"] == "context_experts"


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["nope"],
            ["ask"],
            ["methods", "--nope"],
            ["ask", "x", "--index", "y", "--k", "0"],
            ["eval", "positions", "--data", "x"],
            ["serve", "--port", "70000"],
        ],
    )
    def test_wrong_usage_exits_with_2_and_says_so_on_stderr(self, run, arguments):
        result = run(*arguments)
        assert (result.code, result.out) == (2, "")
        assert "Usage:" in result.err

    def test_help_and_version(self, run):
        result = run("--help")
        assert result.code == 0
        for command in ("demo", "index", "ask", "methods", "verify", "serve", "bench", "eval", "cache"):
            assert command in result.out.split()
        assert run("--version").out == "0.1.0\n"

    def test_json_and_stream_exclude_each_other(self, run):
        assert run("ask", "x", "--index", "y", "--stream", "--json").error["type"] == "ConfigError"

    def test_names_that_are_no_unicode_are_reported_in_valid_json(self, run):
        # What Python makes of the byte 0xff in a name.
        error = run("eval", "positions", "--data", "x\udcff.jsonl", "--out", "y", "--json").error
        assert error["type"] == "EvaluationError"
        assert error["message"].startswith("x\ufffd.jsonl is not a file")

    def test_an_interrupt_exits_with_130(self, run, monkeypatch):
        def interrupted(*_arguments, **_options):
            raise KeyboardInterrupt

        monkeypatch.setattr("rag_posfix.mitigations.MITIGATIONS.names", interrupted)
        result = run("methods")
        assert (result.code, result.out) == (130, "")
        assert result.err.splitlines() == [
            "interrupted; what was finished before is kept, and the same command starts again"
        ]

    def test_help_imports_no_model_library(self, early_ends):
        code, out, _, imported = early_ends[0]
        assert (code or 0, imported) == (0, [])
        assert "Usage:" in out

    @pytest.mark.parametrize("case", range(len(WRONG_VALUES)), ids=[words for words, *_ in WRONG_VALUES])
    def test_a_wrong_value_is_reported_before_a_model_library_is_imported(self, early_ends, case):
        code, out, err, imported = early_ends[case + 1]
        assert (code, out, imported) == (1, "", [])
        assert WRONG_VALUES[case][2] in err
        assert len(err.splitlines()) == 1

    @pytest.mark.slow
    def test_warnings_of_libraries_stay_off_the_terminal(self):
        program = (
            "import logging\nfrom rag_posfix.cli.main import app\napp(['models', 'list'], standalone_mode=False)\n"
            "import huggingface_hub.utils._http, transformers.utils.logging\n"
            "for name in ('huggingface_hub.utils._http', 'transformers.configuration_utils', 'pypdf._reader'):\n"
            "    transformers.utils.logging.get_logger(name).warning('Retrying in 1s')\n"
            "logging.getLogger('rag_posfix.x').warning('ours')\n"
        )
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_VERBOSITY")}
        command = [sys.executable, "-c", program]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == "WARNING rag_posfix.x: ours\n"


@pytest.mark.slow
def test_an_error_is_printed_although_nobody_reads_its_json():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rag_posfix.cli.main", "keys", "revoke", "nope", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error: ")
