"""The scripts of continuous integration. Building and installing takes minutes: `make package` runs them for real."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deployments.ci import coverage_floor, wheel_contents
from deployments.ci.ask_service import CheckError, check

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from rag_posfix.settings import Settings
from rag_posfix_api.server import run
from tests.support.serving import make_pipeline
run(Settings(), "127.0.0.1", 0, pipeline=make_pipeline())
"""


@pytest.mark.slow
def test_a_service_is_started_asked_and_stopped(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert check([sys.executable, "-c", PROGRAM], seconds=240) == "The bridge of Arvo was built in 1911."


def test_a_service_that_ends_is_told_with_its_log():
    with pytest.raises(CheckError, match=r"(?s)ended with exit code 1 before it listened.*no such setting"):
        check([sys.executable, "-S", "-c", "import sys; sys.exit('no such setting')"], seconds=240)


@pytest.fixture
def wheel(tmp_path):
    """A wheel with the files of both packages and no code of a backend."""
    path = tmp_path / "rag_posfix-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("rag_posfix-0.1.0.dist-info/RECORD", "")
        for package in wheel_contents.PACKAGES:
            for file in package.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.writestr(file.relative_to(package.parent).as_posix(), "")
    return path


def test_a_whole_wheel_passes(wheel):
    assert wheel_contents.differences(wheel) == (set(), set())


def test_a_lost_and_a_foreign_file_are_named(wheel, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(other, "w") as archive:
        for name in whole.namelist():
            if name != "rag_posfix/demo_data/passages.jsonl":
                archive.writestr(name, "")
        archive.writestr("tests/test_a.py", "")
    monkeypatch.setattr(sys, "argv", ["wheel_contents.py", str(other)])
    assert wheel_contents.main() == 1
    told = capsys.readouterr().err
    assert "lacks rag_posfix/demo_data/passages.jsonl" in told
    assert "holds tests/test_a.py" in told


@pytest.mark.parametrize(("total", "status", "told"), [(90.0, 0, ""), (89.9, 1, " 12.5 % b.py\n 89.0 % a.py\n")])
def test_coverage_below_the_floor_fails_and_names_the_worst_files_first(
    total, status, told, tmp_path, monkeypatch, capsys
):
    shares = {"a.py": 89, "b.py": 12.5, "c.py": 99}
    files = {name: {"summary": {"percent_covered": share}} for name, share in shares.items()}
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps({"summary": {"percent_covered": total}, "files": files}), "utf-8")
    monkeypatch.setattr(sys, "argv", ["coverage_floor.py", str(file)])
    assert coverage_floor.main() == status
    assert capsys.readouterr().out == f"coverage {total:.1f} %, floor 90 %\n{told}"


def test_the_shell_script_parses_and_calls_what_is_here():
    script = ROOT / "deployments" / "ci" / "check_wheel.sh"
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=60)
    text = script.read_text("utf-8")
    for name in ("wheel_contents.py", "ask_service.py"):
        assert f"$root/deployments/ci/{name}" in text
        assert (script.parent / name).is_file()
    for command in ("rag-posfix models fetch", "rag-posfix demo --json"):
        assert command in text
