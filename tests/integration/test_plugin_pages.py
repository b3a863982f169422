"""The "Add a ..." pages, followed in a package of one's own: its installed wheel is found, listed and conforms."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.pages import blocks, files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["add-a-method.md", "add-a-backend.md"]
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "my-methods"
version = "1.0"

"""
PLUGINS = [
    ("mitigation", "best_last"),
    ("reranker", "word_overlap"),
    ("order", "best_at"),
    ("probe", "attention-distance"),
    ("encoding", "windowed"),
    ("task", "first_symbol"),
    ("cache backend", "dictionary"),
]


def installed(folder, sources, entry_points):
    """Build the wheel of a package with these files and entry points; return the folder that it is installed in."""
    source, site = folder / "source", folder / "site"
    (source / "my_methods").mkdir(parents=True)
    (source / "my_methods" / "__init__.py").write_text("")
    for name, text in sources.items():
        (source / "my_methods" / name).write_text(text)
    (source / "pyproject.toml").write_text(PROJECT + entry_points)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The installed package of all pages."""
    sources = {
        Path(name).name: text
        for page in PAGES
        for name, text in files(page).items()
        if name.startswith("rag_posfix/") and not (ROOT / name).exists()
    }
    tables = "\n".join(text for page in PAGES for kind, text, _ in blocks(page) if kind == "toml")
    return installed(tmp_path_factory.mktemp("package"), sources, tables)


def run(python, folder, *arguments, **variables):
    """Run Python in a folder, which is the first one on its path, before this repository."""
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "services")))
    return python.run(folder, *arguments, environment={**os.environ, "PYTHONPATH": path, **variables})


def conform(python, folder, *options, plugins=""):
    """Run the conformance suite; return what pytest prints."""
    shown = ("-q", "-rsf", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder)
    words = ("-m", "pytest", *shown, "--pyargs", "rag_posfix.conformance", *options)
    return run(python, folder, *words, RAG_POSFIX_PLUGINS=plugins)


def test_methods_lists_the_entries_with_their_package(python, site):
    listed = json.loads(run(python, site, "-m", "rag_posfix.cli.main", "methods", "--json"))
    assert [(each["kind"], each["name"]) for each in listed["plugins"]] == PLUGINS
    assert {each["package"] for each in listed["plugins"]} == {"my-methods"}
    assert "best_last" in {each["name"] for each in listed["mitigations"]}


def test_settings_take_the_names_before_a_model_is_loaded(python, site):
    code = """
from rag_posfix.errors import ConfigError
from rag_posfix.settings import Settings

print(Settings(mitigation="best_last:most=3", order="best_at:position=1", reranker="word_overlap:top_n=2").mitigation)
for wrong in ("best_last:mast=3", "best_lost"):
    try:
        Settings(mitigation=wrong)
    except ConfigError as error:
        print(error)
"""
    lines = run(python, site, "-c", code).splitlines()
    assert lines[0] == "best_last:most=3"
    assert lines[1].startswith("mitigation best_last has no parameter 'mast'. Did you mean 'most'?")
    assert lines[2].startswith("unknown mitigation 'best_lost'. Did you mean 'best_last'")


def test_the_conformance_suite_passes(python, site):
    printed = conform(python, site)
    assert " passed" in printed.splitlines()[-1]
    skipped = [line.partition(": ")[2] for line in printed.splitlines() if line.startswith("SKIPPED")]
    assert sorted(skipped) == ["by_content is False", "got empty parameter set for (name, read)"]


FAULTS = {
    "not order-invariant": ("key=lambda i: (relevance[i], layout.keys[i])", "key=lambda i: i", "each_order"),
    "ties by position": ("(relevance[i], layout.keys[i])", "relevance[i]", "equal_relevance"),
    "a parameter that is not described": ("    Args:\n        most", "    Args:\n        mast", "are_described"),
    "another name": ('name = "best_last"', 'name = "best"', "has_the_name"),
    "a parameter outside of the fingerprint": (
        "    def plan(",
        '    def fingerprint(self):\n        """Forget it."""\n        return "x"\n\n    def plan(',
        "fingerprint",
    ),
}


def test_the_conformance_suite_finds_each_method_that_breaks_its_promise(tmp_path, python):
    text = files("add-a-method.md")["rag_posfix/mitigations/best_last.py"]
    plugins = {f"broken_{number}": fault for number, fault in enumerate(FAULTS.values())}
    for name, (before, after, _) in plugins.items():
        assert text.count(before) == 1
        (tmp_path / f"{name}.py").write_text(text.replace(before, after).replace("best_last", name))
    chosen = " or ".join(test for _, _, test in plugins.values())
    with pytest.raises(AssertionError) as failed:
        conform(python, tmp_path, "-k", chosen, plugins=",".join(f"{name}.py" for name in plugins))
    failures = re.findall(r"^FAILED (.*)", str(failed.value), re.MULTILINE)
    for name, (_, _, test) in plugins.items():
        assert any(test in line and name in line for line in failures), (test, failures)
