"""The "Add a ..." pages: followed in a copy of the repository, they give what they promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import examples, files, write_files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# What each page makes: new files and edited ones, and the contract tests that the new files must pass.
PAGES = {
    "add-a-method.md": (
        10,
        6,
        {
            "tests/contract/test_mitigations.py": "best_last",
            "tests/contract/test_rerankers.py": "word_overlap",
            "tests/contract/test_orders.py": "best_at or every_order_is",
        },
    ),
    "add-a-backend.md": (3, 1, {}),
}


GENERATE_WITHOUT_FIGURES = """
from docs import generate

generate.pictures = generate.reference_pages = lambda folder: {}
generate.main()
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository without what was built or measured. Compiled files are those of the copied sources."""
    for folder in ("rag_posfix", "services", "tests", "docs", "examples"):
        # Another worker may be writing a compiled file, under a name that is gone a moment later.
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copytree(ROOT / "deployments" / "prometheus", tmp_path / "deployments" / "prometheus")
    for file in ("pyproject.toml", "README.md", "mkdocs.yml"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def pytest_in(copy, python, *arguments):
    """Run tests of the copy; return what pytest writes. anyio is a plugin of theirs and a library of transformers."""
    options = ("-p", "no:cacheprovider", "-W", "ignore:Module already imported so cannot be rewritten; anyio")
    return python.run(copy, "-m", "pytest", *options, *arguments)


def check_style(copy, sources):
    """The sources as the page prints them need imports in another order at most."""
    for command in (["check", "--select", "I", "--fix", "-q"], ["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *sources], cwd=copy, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_followed_and_named_in_the_architecture():
    assert set(PAGES) == {path.name for path in (ROOT / "docs").glob("add-a*.md")}
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert all(page in text for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_gives_what_it_promises(copy, python, page):
    new, edited, contract = PAGES[page]
    existing = {name: (copy / name).exists() for name in files(page)}
    assert (list(existing.values()).count(False), list(existing.values()).count(True)) == (new, edited)
    sources = [name for name in write_files(page, copy) if name.endswith(".py")]
    check_style(copy, sources)
    own = [name for name in sources if name.startswith("tests/")]
    if tests := [*own, *contract]:
        chosen = " or ".join([*contract.values(), *(Path(test).stem for test in own)])
        ran = pytest_in(copy, python, *tests, "-k", chosen, "-v")
        assert all(f"{test}::" in ran for test in tests)
    run_examples(python, copy, page)


def test_what_the_pages_add_keeps_the_rules_of_the_architecture(copy, python):
    """All pages in one copy: a rule is about a file or about a room of its own."""
    for page in PAGES:
        write_files(page, copy)
    assert "passed" in pytest_in(copy, python, "tests/test_architecture.py")


def run_examples(python, copy, page):
    """Run the examples of ``page`` as one program; it prints what the page says."""
    found = examples(page)
    assert python.run(copy, "-c", "".join(code for code, _ in found)) == "".join(said or "" for _, said in found)


@pytest.mark.parametrize("page", PAGES)
def test_the_edited_lines_are_needed(copy, python, page):
    """Otherwise a page asks for a step that nobody needs."""
    for name in write_files(page, copy):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    with pytest.raises(AssertionError):
        run_examples(python, copy, page)


def test_a_new_reranker_gets_its_page_and_is_listed(copy, python):
    written = write_files("add-a-method.md", copy)
    assert len(written) == 16
    listed = python.run(copy, "-m", "rag_posfix.cli.main", "methods", "--json")
    assert "word_overlap" in json.loads(listed)["rerankers"]
    python.run(copy, "-c", GENERATE_WITHOUT_FIGURES)
    assert "## word_overlap\n\nCount the words" in (copy / "docs" / "reranking.md").read_text("utf-8")
