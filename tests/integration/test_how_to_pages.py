"""The pages "Add a reranker" and "Add an order": followed in a copy of the repository, they give what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED_CODE = re.compile(r"`([\w/]+\.py)`[^`]*?:\n\n```python\n(.*?)```", re.DOTALL)


def named_code(page):
    """Return the code blocks of a page by the file that the sentence before each names."""
    return dict(NAMED_CODE.findall((ROOT / "docs" / page).read_text("utf-8")))


def insert(path, line, before):
    """Write a line into a file, before the first line that starts with ``before``."""
    text = path.read_text("utf-8")
    assert f"\n{before}" in text
    path.write_text(text.replace(f"\n{before}", f"\n{line}{before}", 1), "utf-8")


@pytest.fixture
def copy(tmp_path):
    """A copy of the repository without what was built or measured."""
    for folder in ("rag_posfix", "services", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(copy, *arguments):
    """Run a module of the copy; return what it wrote."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "services")])}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(copy, files, contract, name):
    """Run the linter and the tests that a change must pass, those of the new files first."""
    sources = [file for file in files if not file.endswith("__init__.py")]
    run(copy, "ruff", "check", *files)
    run(copy, "ruff", "format", "--check", *files)
    test = next(file for file in sources if file.startswith("tests/"))
    assert "1 passed" in run(copy, "pytest", test, "-q", "-p", "no:cacheprovider")
    passed = run(copy, "pytest", contract, "-q", "-k", f"{name} or every_order_is", "-p", "no:cacheprovider")
    assert re.search(r"\d+ passed", passed)
    run(copy, "pytest", "tests/test_architecture.py", "-q", "-p", "no:cacheprovider")
    return json.loads(run(copy, "rag_posfix.cli.main", "methods", "--json"))


def test_a_reranker_is_added_as_the_page_says(copy):
    files = named_code("add-a-reranker.md")
    assert list(files) == [
        "rag_posfix/reranking/word_overlap.py",
        "rag_posfix/reranking/__init__.py",
        "tests/unit/reranking/test_word_overlap.py",
    ]
    source, package, test = files
    (copy / source).write_text(files[source], "utf-8")
    insert(copy / package, files[package], before="\n__all__")
    (copy / test).write_text(files[test], "utf-8")
    methods = check(copy, files, "tests/contract/test_rerankers.py", "word_overlap")
    assert "word_overlap" in methods["rerankers"]
    run(copy, "docs.generate")
    assert "## word_overlap\n\nCount the words" in (copy / "docs" / "reranking.md").read_text("utf-8")


def test_an_order_is_added_as_the_page_says(copy):
    files = named_code("add-an-order.md")
    assert list(files) == [
        "rag_posfix/assembly/orders/best_at.py",
        "rag_posfix/assembly/orders/__init__.py",
        "tests/unit/assembly/orders/test_best_at.py",
    ]
    source, package, test = files
    (copy / source).write_text(files[source], "utf-8")
    insert(copy / package, files[package], before="from rag_posfix.assembly.orders import by_relevance")
    (copy / test).write_text(files[test], "utf-8")
    methods = check(copy, files, "tests/contract/test_orders.py", "best_at")
    assert "best_at" in methods["orders"]
