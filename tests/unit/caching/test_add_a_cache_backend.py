"""The steps of docs/add-a-cache-backend.md, done on a copy of the package, add backends that the builders use."""

import shutil
from pathlib import Path

import pytest

import rag_posfix
from tests.support.pages import blocks, examples
from tests.support.subprocesses import run_python

PAGE = "add-a-cache-backend.md"


@pytest.fixture
def files():
    """What the page says to write, by path: two new files, and one line of two others."""
    return {name: text for kind, text, name in blocks(PAGE) if kind == "python" and name is not None}


@pytest.fixture
def copy(tmp_path, files):
    """The folder of a copy of the package to which the page was applied."""
    shutil.copytree(Path(rag_posfix.__file__).parent, tmp_path / "rag_posfix", ignore=shutil.ignore_patterns("*.pyc"))
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(with_line(path.read_text("utf-8"), text) if path.exists() else text, "utf-8")
    return tmp_path


def with_line(source, line):
    """Return ``source`` with ``line`` in place of the line that imports the backends."""
    start = line.partition(" import ")[0] + " import "
    (old,) = [found for found in source.splitlines(keepends=True) if found.startswith(start)]
    return source.replace(old, line)


def test_a_new_backend_is_one_file_and_one_line_for_each_cache(files):
    lines = {name: len(text.splitlines()) for name, text in files.items()}
    assert [name for name, count in lines.items() if count > 1] == [
        "rag_posfix/caching/answers/dictionary.py",
        "rag_posfix/caching/kv/dictionary.py",
    ]
    assert [name for name, count in lines.items() if count == 1] == [
        "rag_posfix/caching/answers/build.py",
        "rag_posfix/caching/kv/build.py",
    ]


def test_the_builders_use_the_backends_of_the_page_and_print_what_it_says(copy):
    found = examples(PAGE)
    assert len(found) == 2
    where = "import rag_posfix\nprint(rag_posfix.__file__)\n"
    printed = run_python(where + "".join(code for code, _ in found), cwd=copy)
    assert printed == str(copy / "rag_posfix" / "__init__.py") + "\n" + "".join(said for _, said in found).strip()


def test_a_backend_whose_line_is_missing_is_not_used(copy):
    """Otherwise the page would ask for a step that is not needed."""
    for cache in ("answers", "kv"):
        shutil.copy(
            Path(rag_posfix.__file__).parent / "caching" / cache / "build.py",
            copy / "rag_posfix" / "caching" / cache / "build.py",
        )
    script = """
        from pathlib import Path
        from rag_posfix.caching.answers.build import build_answer_cache
        from rag_posfix.settings import CacheSettings
        cache = build_answer_cache(CacheSettings(disk_bytes=0), Path("caches"))
        print([tier["name"] for tier in cache.stats()["tiers"]])
    """
    assert run_python(script, cwd=copy) == "['memory']"
