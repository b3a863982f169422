"""``index``: passages, and their keys and values."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


QUESTION = "Who designed the Maravel lighthouse?"


def test_show_prints_files_and_fields_of_an_index(run, letter_index, files):
    result = run("index", "--show", letter_index)
    first, *lines = result.out.splitlines()
    assert first.startswith(f"{letter_index}: 3 passages, embedding ")
    assert [line for line in lines if line.startswith("  ") and ": 1" in line and str(files) in line] == [
        f"  {files / name}: 1" for name in ("bread.txt", "bridge.md", "facts.jsonl")
    ]
    assert "  end: 2 number in 2 passages; 2 different: 58, 75" in lines
    found = run("index", "--show", letter_index, "--json").json
    assert found["passages"] == 3
    assert {field["name"]: field["types"] for field in found["fields"]}["end"] == {"number": 2}


def test_show_takes_an_index_and_no_files(run, files, letter_index, tmp_path):
    assert run("index", files, "--show", letter_index).code == 2
    assert run("index").code == 2
    assert "no index" in run("index", "--show", tmp_path, "--json").error["message"]


@pytest.mark.weights
class TestIndex:
    def test_without_json_it_is_one_line(self, run, files, tmp_path):
        result = run("index", files / "bread.txt", "--out", tmp_path / "new.index")
        assert result.out.startswith("indexed 1 passage in ")
        assert "added" not in result.out
        again = run("index", files, "--out", tmp_path / "new.index")
        assert "2 added, 0 changed, 1 unchanged, 0 removed" in again.out.splitlines()

    @pytest.mark.slow
    def test_a_second_time_only_what_is_new_is_read_and_what_is_gone_is_forgotten(
        self, run, tiny, files, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("RAG_POSFIX_KEEP_ON_DISK", "true")
        folder, index = tmp_path / "files", tmp_path / "new.index"
        shutil.copytree(files, folder)
        assert run("index", folder, "--out", index, "--json").json["added"] == 3
        asked = ["ask", QUESTION, "--index", index, "--min-relevance", "off", "--max-tokens", "2", "--json"]
        assert len(run(*asked).json["documents"]) == 3
        (folder / "bread.txt").unlink()
        (folder / "new.html").write_text("<title>New</title><p>A new page.")
        found = run("index", folder, "--out", index, "--json").json
        counts = [found[name] for name in ("passages", "added", "changed", "unchanged", "removed")]
        assert counts == [3, 1, 0, 2, 1]
        assert found["invalidated"]["answers"] == 1
        again = run("index", folder, "--out", index, "--rebuild", "--json").json
        assert [again[name] for name in ("added", "unchanged", "removed")] == [3, 0, 0]

    def test_the_passages_of_an_emptied_folder_are_removed_beside_others(self, run, files, tmp_path):
        index, folder = tmp_path / "new.index", tmp_path / "more"
        folder.mkdir()
        (folder / "a.txt").write_text("A page that goes.")
        assert run("index", files, folder, "--out", index, "--json").json["added"] == 4
        (folder / "a.txt").unlink()
        found = run("index", folder, "--out", index, "--json").json
        assert (found["passages"], found["removed"]) == (3, 1)

    def test_an_unknown_embedding_model_is_named(self, run, files, tmp_path):
        error = run(
            "index", files, "--out", tmp_path / "i", "--embedding-model", tmp_path / "none", "--json"
        ).error  # fmt: skip
        assert str(tmp_path / "none") in error["message"]


def test_a_model_that_does_not_exist_is_reported_before_anything_is_embedded(run, tiny, files, tmp_path):
    missing = tmp_path / "no-model"
    options = ("--precompute", "context_experts", "--model", missing, "--json")
    error = run("index", files, "--out", tmp_path / "i", *options).error
    assert str(missing) in error["message"]
    assert not (tmp_path / "i").exists()


@pytest.mark.weights
@pytest.mark.slow
class TestPrecompute:
    @pytest.mark.slow
    def test_what_was_read_for_the_index_is_not_read_again_by_another_process(
        self, run, files, tmp_path, cache_dir, python, tiny_model, monkeypatch
    ):
        monkeypatch.setenv("RAG_POSFIX_MODEL", str(tiny_model))
        index = tmp_path / "new.index"
        found = run("index", files, "--out", index, "--precompute", "context_experts", "--json").json
        assert found["passages"] == 3
        read = found["precomputed"]
        assert set(read) == {"mitigation", "tokens", "bytes", "seconds"}
        assert read["mitigation"] == "context_experts"
        stored = {tier["name"]: tier for tier in run("cache", "stats", "--json").json["passages"]["tiers"]}["disk"]
        assert read["bytes"] == stored["bytes"] > 0
        assert stored["entries"] > 0
        assert read["seconds"] > 0
        assert (cache_dir / "passages").stat().st_mode & 0o077 == 0, "passages are private"

        command = ("-m", "rag_posfix.cli.main", "ask", QUESTION, "--index", index, "--json")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAG_POSFIX_MAX_TOKENS": "8",
            "RAG_POSFIX_MIN_RELEVANCE": "off",
        }
        answer = json.loads(python.run(ROOT, *command, environment=environment).splitlines()[-1])
        assert answer["cached"] is False
        assert answer["usage"]["cached_tokens"] == read["tokens"], "the prefix and all three passages"
        assert 0 < answer["usage"]["cached_tokens"] < answer["usage"]["prompt_tokens"]
        assert answer["answer"]

        again = run("index", files, "--out", index, "--precompute", "set_prompting", "--json").json["precomputed"]
        assert (again["tokens"], again["bytes"]) == (0, read["bytes"]), "which reads passages alike"

    def test_without_json_it_is_one_more_line(self, run, files, tmp_path, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_MEMORY_BYTES", "0")
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_DISK_BYTES", "100000000")
        result = run("index", files / "bread.txt", "--out", tmp_path / "i", "--precompute", "parallel_windows")
        assert result.code == 0
        assert re.search(
            r"precomputed \d+ tokens for parallel_windows in .* store holds [1-9]", " ".join(result.out.split())
        )

    def test_a_store_that_is_turned_off_is_told_before_anything_is_done(
        self, run, files, tmp_path, cache_dir, monkeypatch
    ):
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_DISK_BYTES", "0")
        index = tmp_path / "new.index"
        error = run("index", files, "--out", index, "--precompute", "context_experts", "--json").error
        assert error["type"] == "ConfigError"
        assert error["message"].startswith(
            "--precompute needs a passage KV store on disk or in Redis, and the settings turn both off; set "
            "RAG_POSFIX_PASSAGES_ENABLED=true and "
        )
        assert not index.exists()
        assert not (cache_dir / "passages").exists()

    def test_a_method_that_does_not_read_apart_leaves_the_index_and_no_store(self, run, files, tmp_path, cache_dir):
        index = tmp_path / "new.index"
        error = run("index", files, "--out", index, "--precompute", "none", "--json").error
        assert error["type"] == "ConfigError"
        assert error["message"].startswith("none does not read passages independently of each other on SmolLM2-135M")
        assert index.exists()
        assert not (cache_dir / "passages").exists(), "or later questions would be written to disk"
