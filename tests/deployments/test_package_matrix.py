"""The matrix of Pythons and packages: which runs it plans; the runs themselves take minutes (`make test-matrix`)."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from deployments.ci import test_matrix as matrix

ROOT = Path(__file__).resolve().parents[2]


def test_oldest_is_the_lower_bound_and_newest_the_range_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    oldest, newest = matrix.requirements("oldest"), matrix.requirements("newest")
    assert [line.partition("==")[0] for line in oldest] == ["torch", "transformers", "langchain-core"]
    assert all(f'"{line}"' in text for line in newest)
    assert [line.replace("==", ">=") for line in oldest] == [line.partition(",")[0] for line in newest]


def test_each_python_of_the_classifiers_is_run_and_the_first_is_the_promised_minimum():
    pythons = matrix.promised_pythons()
    assert f">={pythons[0]}" == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    current = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert current in pythons
    assert matrix.interpreter(current) is not None
    assert matrix.interpreter("2.0") is None


@pytest.mark.slow
def test_a_package_that_cannot_be_installed_leaves_the_run_out_and_does_not_fail(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["test_matrix.py", "--small"])
    for name, value in {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert matrix.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["test-matrix: oldest", "test-matrix: newest"]
    assert all("not installable here, left out: ERROR: No matching distribution" in line for line in lines)


@pytest.mark.parametrize("path", [path for paths in matrix.TESTS.values() for path in paths])
def test_the_tests_of_the_matrix_exist(path):
    assert (ROOT / path).exists()


def test_a_small_run_has_the_tests_of_packages_with_other_versions_than_here():
    here = {"Python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "langchain-core": "1.7.2"}
    assert matrix.tests_of(here, here) == []
    assert matrix.tests_of(here | {"langchain-core": "1.8.4"}, here) == list(matrix.TESTS["langchain-core"])
    assert matrix.tests_of(here, {}) == [path for paths in matrix.TESTS.values() for path in paths]
