from __future__ import annotations

from pathlib import Path

import pytest

from rag_posfix.contracts.generator import display_name


def test_a_folder_is_named_without_its_place():
    names = ("/srv/models/mine", "./mine", "~/models/mine", "/srv/models/mine/", "models/../mine")
    assert [display_name(name) for name in names[:4]] == ["mine"] * 4
    assert display_name(names[4]) == names[4]  # nothing on this disk: an id


def test_ids_stay():
    names = ["owner/name", "smollm2", "openai:llama@http://localhost:8080/v1", "a" * 5000, "a/\0"]
    assert [display_name(name) for name in names] == names


def test_a_relative_folder_that_exists_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert display_name("models/mine") == "mine"
