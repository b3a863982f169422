from __future__ import annotations

import os
from pathlib import Path

import pytest

from rag_posfix.files import flush, replace_durably


def test_a_file_is_replaced_with_the_permissions_asked_for(tmp_path: Path):
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")
    replace_durably(path, b"new", 0o600)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]


def test_after_a_full_disk_the_former_file_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "keys.json"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rag_posfix.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_durably(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["keys.json"], "the half-written file is removed"


def test_the_content_is_on_the_disk_before_the_name_and_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    monkeypatch.setattr("rag_posfix.files.os.fsync", lambda descriptor: done.append("fsync"))
    monkeypatch.setattr("rag_posfix.files.os.replace", lambda old, new: done.append("replace"))
    replace_durably(tmp_path / "log", b"")
    assert done == ["fsync", "replace", "fsync"]


def test_flush_takes_files_and_folders(tmp_path: Path):
    (tmp_path / "log").write_bytes(b"1")
    flush(tmp_path / "log")
    flush(tmp_path)
    with pytest.raises(FileNotFoundError):
        flush(tmp_path / "missing")
