"""Every command and every example of the README runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.command_line import command_line
from tests.support.redis_server import free_port
from tests.support.subprocesses import wait_until_ready

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BASH = [block.strip() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)]
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BASH if not block.startswith("curl") for line in block.splitlines()]
CURL = next(block for block in BASH if block.startswith("curl"))


def run(command, folder, **options):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, **options)


def arguments_of(line):
    words = shlex.split(line)
    assert words[0] == "rag-posfix"
    return words[1:]


@pytest.fixture(scope="module")
def environment(tiny_model):
    """For processes of their own. The model is a random one: the library example reads the packaged weights."""
    return {
        **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}", "RAG_POSFIX_MODEL": str(tiny_model),
    }  # fmt: skip


@pytest.fixture
def printed_by(capsysbinary, monkeypatch, folder):
    """Run the README's command that begins so in this process and in the folder; return what it prints."""
    monkeypatch.chdir(folder)

    def call(command):
        line = next(line for line in COMMANDS if line.startswith(command))
        code, out, err = command_line(capsysbinary)(*arguments_of(line))
        assert code == 0, err
        return out

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that looks like a clone to the README's commands."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("rag_posfix",):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def index(folder, python, environment):
    line = next(command for command in COMMANDS if command.startswith("rag-posfix index"))
    printed = python.run(folder, "-m", "rag_posfix.cli.main", *arguments_of(line), environment=environment)
    assert "indexed 52 passages" in printed
    return folder / "demo.index"


def test_every_command_of_the_readme_is_one_that_these_tests_run():
    known = ("make demo", "make test", "pip install '.[local]'", "rag-posfix models fetch", "rag-posfix index ",
             "rag-posfix ask ", "rag-posfix methods", "rag-posfix verify", "rag-posfix serve ")  # fmt: skip
    assert [line for line in COMMANDS if not line.startswith(known)] == []
    assert len([block for block in BASH if block.startswith("curl")]) == 1
    assert len(PYTHON) == 1


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_make_targets_run_what_the_readme_says(target):
    assert f"make {target}" in COMMANDS
    planned = run(["make", "--dry-run", "--always-make", target], ROOT)
    assert planned.returncode == 0, planned.stderr
    expected = {"demo": "rag-posfix demo", "test": "-m pytest"}[target]
    assert expected in planned.stdout


def test_the_install_command_names_an_extra_that_exists():
    import tomllib

    line = next(command for command in COMMANDS if command.startswith("pip"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert re.findall(r"\[(\w+)\]", line) == ["local"]
    for name in re.findall(r"in the brackets: (.*?)\. All extras", README, re.DOTALL)[0].split("`")[1::2]:
        assert name in extras
    done = run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--no-build-isolation",
         *shlex.split(line)[2:]],
        ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.weights
def test_the_library_example_answers_from_the_right_passage(folder, python, environment):
    program = f"import warnings\nwarnings.simplefilter('error', ResourceWarning)\n{PYTHON[0]}"
    printed = python.run(folder, "-c", program, environment={**environment, "RAG_POSFIX_MODEL": "smollm2"})
    assert "ResourceWarning" not in printed
    assert "Ilse Korvanth" in printed
    shares = json.loads(printed.splitlines()[-1].replace("'", '"'))
    assert shares["maravel"] > shares["torvane"]


@pytest.mark.weights
def test_asking_prints_the_answer_and_its_sources(printed_by, index, monkeypatch, tiny_model):
    monkeypatch.setenv("RAG_POSFIX_MODEL", str(tiny_model))
    assert "[1] " in printed_by("rag-posfix ask")


@pytest.mark.weights
@pytest.mark.parametrize(("command", "expected"), [("methods", "context_experts"), ("verify", "supported:")])
def test_the_commands_without_input_run(printed_by, command, expected):
    assert expected in printed_by(f"rag-posfix {command}")


@pytest.mark.weights
def test_the_service_answers_the_curl_command(folder, index, python, environment, tmp_path):
    port = str(free_port())
    line = next(command for command in COMMANDS if command.startswith("rag-posfix serve"))
    words = [port if word == "8000" else word for word in arguments_of(line)]
    command = ("-m", "rag_posfix.cli.main", *words)
    server = python.start(folder, *command, output=tmp_path / "log", environment=environment)
    try:
        wait_until_ready(server, port)
        words = shlex.split(CURL.replace(":8000/", f":{port}/"))
        if shutil.which("curl"):
            answer = run([words[0], "--silent", *words[1:]], folder).stdout
        else:
            request = urllib.request.Request(words[1], words[5].encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as response:
                answer = response.read()
    finally:
        server.terminate()
        server.wait(60)
    completion = json.loads(answer)
    assert completion["choices"][0]["message"]["content"]
    assert {document["id"] for document in completion["documents"]} == {"torvane", "maravel"}
