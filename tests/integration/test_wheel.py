"""The wheel holds two packages and runs without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def build(source, folder, target):
    """Build a distribution of the project in ``source`` with the backend of ``pyproject.toml``; return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel, built from the source distribution: what is missing there is missing in the wheel."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed, *arguments):
    """Run Python with the installed packages before those of the repository; return what it wrote."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import rag_posfix_api
from rag_posfix.cli import main
from rag_posfix.demo_data import load_passages

print(main.__file__, rag_posfix_api.__file__, len(load_passages()), sep="\\n")
"""


def test_the_wheel_installs_two_packages_and_nothing_else(installed):
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"rag_posfix", "rag_posfix_api"}
    assert len(names) == 3


def test_the_wheel_holds_every_file_of_both_packages(installed):
    for package in (ROOT / "rag_posfix", ROOT / "services" / "rag_posfix_api"):
        files = {path.relative_to(package.parent) for path in package.rglob("*") if path.is_file()}
        expected = {path for path in files if "__pycache__" not in path.parts}
        assert expected <= {path.relative_to(installed) for path in installed.rglob("*")}


def test_the_source_distribution_holds_tests_docs_and_benchmarks(sdist):
    with tarfile.open(sdist) as archive:
        folders = {Path(name).parts[1] for name in archive.getnames()}
    assert {"rag_posfix", "services", "tests", "docs", "benchmarks", "Makefile", "constraints.txt"} <= folders


def test_the_command_and_the_data_of_the_demo_are_those_of_the_wheel(installed):
    """The first lines of the README run from a wheel in test_first_install."""
    file, service, passages = run(installed, "-c", PROGRAM).splitlines()
    assert file.startswith(str(installed))
    assert service.startswith(str(installed))
    assert passages == "52"
