"""What `import rag_posfix` gives, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import rag_posfix
from deployments.ci import release
from rag_posfix import evaluation
from tests.support.exports import seen_by_type_checkers

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("name", "module"), seen_by_type_checkers(rag_posfix).items())
def test_every_public_name_is_that_of_the_module_that_type_checkers_see_it_in(name: str, module: str) -> None:
    home = import_module(module)
    assert getattr(rag_posfix, name) is getattr(home, name)
    assert name in home.__all__


def test_only_modules_of_exported_names_have_all() -> None:
    homes = {home for package in (rag_posfix, evaluation) for home in seen_by_type_checkers(package).values()}
    modules = [file for folder in ("rag_posfix", "services") for file in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 300
    with_all = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in modules
        if file.name != "__init__.py" and "\n__all__ =" in file.read_text("utf-8")
    }
    assert with_all <= homes


def test_the_public_names_are_listed_once_and_sorted_without_regard_to_case() -> None:
    assert set(rag_posfix.__all__) == set(seen_by_type_checkers(rag_posfix))
    assert rag_posfix.__all__ == sorted(set(rag_posfix.__all__), key=str.casefold)


def test_dir_lists_names_that_were_not_used_yet() -> None:
    listed = run_python("import rag_posfix; print(json.dumps(dir(rag_posfix)))")
    assert set(rag_posfix.__all__) | {"__version__"} <= set(listed)


def test_a_name_is_kept_once_it_was_looked_up() -> None:
    code = "import rag_posfix; rag_posfix.RagPosfixError; print(json.dumps('RagPosfixError' in vars(rag_posfix)))"
    assert run_python(code) is True


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'rag_posfix' has no attribute 'Pipelin'"):
        rag_posfix.Pipelin  # noqa: B018
    assert not hasattr(rag_posfix, "torch")


def test_the_version_is_in_one_place_which_builds_read() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "rag_posfix/__init__.py"
    assert release.version() == rag_posfix.__version__


def test_importing_loads_thirty_modules_at_most_without_other_packages_and_changes_no_environment() -> None:
    code = (
        "import os; environment, modules = dict(os.environ), set(sys.modules); import rag_posfix; "
        "print(json.dumps([sorted(set(sys.modules) - modules), environment == dict(os.environ)]))"
    )
    loaded, is_unchanged = run_python(code)
    assert is_unchanged
    assert {name.partition(".")[0] for name in loaded} <= {"rag_posfix", *sys.stdlib_module_names}
    assert len(loaded) <= 30


def run_python(code: str):
    """Run ``code`` in a fresh interpreter and return the JSON that it prints."""
    command = [sys.executable, "-c", f"import json, sys; {code}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)
