"""The command line as users and programs see it: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rag_posfix.assembly.orders import ORDERS
from rag_posfix.cli import main as cli
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.record import read_record
from rag_posfix.folders import default_cache_dir
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.file_parameters import with_file_parameters
from tests.support.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
QUESTION = "Who designed the Maravel lighthouse?"
PASSAGES = {
    "facts.jsonl": json.dumps(
        {"id": "lighthouse", "text": "The Maravel lighthouse was designed by Ilse Korvanth and was first lit in 1868."}
    ),
    "bridge.md": "# Bridges\n\nThe Ostrel bridge crosses the river Venn and is 210 metres long.",
    "bread.txt": "Rye bread from Tull is baked for nine hours in clay ovens.",
}


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        """The one object on stdout."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def error(self):
        assert self.code == 1
        assert list(self.json) == ["error"]
        assert set(self.json["error"]) == {"type", "message"}
        assert "Traceback" not in self.err
        assert "\n" not in self.json["error"]["message"]
        return self.json["error"]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path_factory, monkeypatch):
    """Answers go to a folder of the test; converted weights stay where they are."""
    folder = tmp_path_factory.mktemp("cache")
    models = default_cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    monkeypatch.setenv("RAG_POSFIX_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run(capsysbinary):
    def call(*arguments):
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        captured = capsysbinary.readouterr()
        return Result(exit_.value.code or 0, captured.out.decode(), captured.err.decode())

    return call


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, text in PASSAGES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="session")
def index(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "my.index"
    with pytest.raises(SystemExit) as exit_:
        cli.main(["index", str(files), "--out", str(folder)])
    assert not exit_.value.code
    return folder


class TestMethods:
    def test_json_lists_everything_that_can_be_chosen(self, run):
        found = run("methods", "--json").json
        assert set(found) == {"mitigations", "orders", "rerankers", "first_stages"}
        by_name = {one["name"]: one for one in found["mitigations"]}
        assert {"none", "context_experts", "parallel_windows"} <= set(by_name)
        assert {"ends_first", "original", "random", "relevance", "reverse"} <= set(found["orders"])
        assert {"cross_encoder", "embedding", "in_context", "likelihood", "listwise"} <= set(found["rerankers"])
        for one in by_name.values():
            assert {"paper", "order_invariant", "needs_calibration", "training_free", "parameters"} <= set(one)
        experts = by_name["context_experts"]
        assert experts["order_invariant"] is True
        assert by_name["none"]["order_invariant"] is False
        assert experts["parameters"]["hold"]["default"] == 1.0

    def test_without_json_it_is_a_table(self, run):
        result = run("methods")
        assert result.code == 0
        assert "context_experts" in result.out
        shown = (f"{name} (attnrank)" if name == "profile" else name for name in ORDERS.names())
        assert f"orders: {', '.join(shown)}" in " ".join(result.out.split())

    @pytest.mark.parametrize(
        ("alias", "name"),
        [("pine", "inter_document"), ("rotor", "sorted_inter_document"), ("pcw", "parallel_windows")],
    )
    def test_the_names_of_papers_are_listed_and_find_their_method(self, run, alias, name):
        lines = [line.split("│")[1].strip() for line in run("methods").out.splitlines() if line.startswith("│")]
        assert lines[lines.index(name) + 1] == f"({alias})"
        (one,) = run("methods", alias, "--json").json["mitigations"]
        assert (one["name"], one["aliases"]) == (name, [alias])

    def test_rerankers_are_listed_with_the_names_of_papers(self, run):
        assert "in_context (icr), likelihood (longllmlingua)," in " ".join(run("methods").out.split())

    @pytest.mark.parametrize(
        ("typed", "suggested"), [("PINE", "'pine' (inter_document)"), ("rotr", "'rotor' (sorted_inter_document)")]
    )
    def test_a_mistyped_name_of_a_paper_suggests_the_alias_with_its_method(self, run, typed, suggested):
        assert f"unknown mitigation {typed!r}. Did you mean {suggested}" in run("methods", typed).err

    def test_one_method_is_shown_in_full(self, run):
        result = run("methods", "context_experts")
        assert result.code == 0
        for part in ("Source:", "Formula:", "Differs from the paper:", "Cost:", "Limits:"):
            assert part in result.out
        (one,) = run("methods", "context_experts", "--json").json["mitigations"]
        assert one["name"] == "context_experts"

    def test_an_unknown_name_suggests_the_nearest(self, run):
        result = run("methods", "context_expert")
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: unknown mitigation 'context_expert'. Did you mean 'context_experts'?")
        assert len(result.err.splitlines()) == 1
        error = run("methods", "nope", "--json").error
        assert error["type"] == "UnknownNameError"
        assert error["message"].startswith("unknown mitigation 'nope'. ")
        assert "Available: blended, calibrated_attention, canonical_rotations, committee, " in error["message"]


class TestUsage:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["nope"],
            ["ask"],
            ["ask", "x"],
            ["index", "x"],
            ["methods", "--nope"],
            ["ask", "x", "--index", "y", "--k", "0"],
            ["ask", "x", "--index", "y", "--k", "many"],
            ["demo", "--questions", "0"],
            ["eval", "positions", "--data", "x"],
            ["serve", "--port", "70000"],
            ["serve", "--log-format", "xml"],
        ],
    )
    def test_wrong_usage_exits_with_2_and_says_so_on_stderr(self, run, arguments):
        result = run(*arguments)
        assert (result.code, result.out) == (2, "")
        assert "Usage:" in result.err

    def test_help_and_version(self, run):
        result = run("--help")
        assert result.code == 0
        for command in ("demo", "index", "ask", "methods", "verify", "serve", "bench", "eval", "cache"):
            assert f" {command} " in result.out
        assert run("--version").out == "0.1.0\n"

    def test_json_and_stream_exclude_each_other(self, run):
        assert run("ask", "x", "--index", "y", "--stream", "--json").error["type"] == "ConfigError"

    def test_names_that_are_no_unicode_are_reported_in_valid_json(self, run):
        # What Python makes of the byte 0xff in a name.
        error = run("eval", "positions", "--data", "x\udcff.jsonl", "--out", "y", "--json").error
        assert error["type"] == "EvaluationError"
        assert error["message"].startswith("x\ufffd.jsonl is not a file")

    @pytest.mark.parametrize(
        ("name", "value", "part"),
        [
            ("RAG_POSFIX_K", "0", "setting k"),
            ("RAG_POSFIX_DTYPE", "int3", "setting dtype"),
            ("RAG_POSFIX_CACHE_TTL_SECONDS", "soon", "setting ttl_seconds"),
            ("RAG_POSFIX_CACHE", "{", "cache"),
        ],
    )
    def test_a_setting_that_cannot_be_read_is_one_line(self, run, monkeypatch, name, value, part):
        monkeypatch.setenv(name, value)
        error = run("cache", "stats", "--json").error
        assert error["type"] == "ConfigError"
        assert part in error["message"]

    def test_an_interrupt_exits_with_130(self, run, monkeypatch):
        def interrupted(*_arguments, **_options):
            raise KeyboardInterrupt

        monkeypatch.setattr("rag_posfix.mitigations.MITIGATIONS.names", interrupted)
        result = run("methods")
        assert (result.code, result.out) == (130, "")
        assert result.err.splitlines() == [
            "interrupted; what was finished before is kept, and the same command starts again"
        ]

    def test_help_takes_less_than_a_second(self):
        command = [sys.executable, "-m", "rag_posfix.cli.main", "--help"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        wall, processor = [], []
        for _ in range(5):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - started)
            processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "Usage:" in done.stdout
        assert min(processor) < 1.0
        assert min(wall) < 2.0  # on a machine that does other things too


@pytest.mark.weights
class TestIndex:
    def test_json_says_what_was_indexed(self, run, files, tmp_path):
        found = run("index", files, "--out", tmp_path / "new.index", "--json").json
        assert found["index"] == str(tmp_path / "new.index")
        assert (found["passages"], found["dimension"]) == (3, 384)
        assert found["seconds"] > 0
        assert (tmp_path / "new.index").is_dir()

    def test_without_json_it_is_one_line(self, run, files, tmp_path):
        result = run("index", files / "bread.txt", "--out", tmp_path / "new.index")
        assert result.out.startswith("indexed 1 passages in ")
        assert "added" not in result.out
        again = run("index", files, "--out", tmp_path / "new.index")
        assert again.out.splitlines()[-1] == "2 added, 0 changed, 1 unchanged, 0 removed"

    def test_a_second_time_only_what_is_new_is_read_and_what_is_gone_is_forgotten(self, run, files, tmp_path):
        folder, index = tmp_path / "files", tmp_path / "new.index"
        shutil.copytree(files, folder)
        assert run("index", folder, "--out", index, "--json").json["added"] == 3
        asked = ["ask", QUESTION, "--index", index, "--max-tokens", "2", "--json"]
        assert len(run(*asked).json["documents"]) == 3
        (folder / "bread.txt").unlink()
        (folder / "new.html").write_text("<title>New</title><p>A new page.")
        found = run("index", folder, "--out", index, "--json").json
        counts = [found[name] for name in ("passages", "added", "changed", "unchanged", "removed")]
        assert counts == [3, 1, 0, 2, 1]
        assert found["forgotten"]["answers"] == 1
        again = run("index", folder, "--out", index, "--rebuild", "--json").json
        assert [again[name] for name in ("added", "unchanged", "removed")] == [3, 0, 0]

    def test_an_empty_folder_is_refused_and_nothing_is_written(self, run, tmp_path):
        (tmp_path / "empty").mkdir()
        error = run("index", tmp_path / "empty", "--out", tmp_path / "new.index", "--json").error
        assert error["type"] == "RetrievalError"
        assert str(tmp_path / "empty") in error["message"]
        assert not (tmp_path / "new.index").exists()

    def test_a_file_that_is_missing_is_named(self, run, tmp_path):
        error = run("index", tmp_path / "missing.txt", "--out", tmp_path / "new.index", "--json").error
        assert str(tmp_path / "missing.txt") in error["message"]

    def test_an_unknown_embedding_model_is_named(self, run, files, tmp_path):
        error = run(
            "index", files, "--out", tmp_path / "i", "--embedding-model", tmp_path / "none", "--json"
        ).error  # fmt: skip
        assert str(tmp_path / "none") in error["message"]


@pytest.mark.weights
class TestPrecompute:
    def test_what_was_read_for_the_index_is_not_read_again_by_another_process(self, run, files, tmp_path, cache_dir):
        index = tmp_path / "new.index"
        found = run("index", files, "--out", index, "--precompute", "context_experts", "--json").json
        assert found["passages"] == 3
        read = found["precomputed"]
        assert set(read) == {"mitigation", "tokens", "bytes", "seconds"}
        assert read["mitigation"] == "context_experts"
        assert read["bytes"] == sum(file.stat().st_size for file in (cache_dir / "passages").rglob("*.kv"))
        assert read["seconds"] > 0
        assert (cache_dir / "passages").stat().st_mode & 0o077 == 0, "passages are private"

        command = [sys.executable, "-m", "rag_posfix.cli.main", "ask", QUESTION, "--index", str(index), "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAG_POSFIX_MAX_TOKENS": "8"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
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

    @pytest.mark.parametrize(
        ("name", "value"), [("RAG_POSFIX_PASSAGES_ENABLED", "false"), ("RAG_POSFIX_PASSAGES_DISK_BYTES", "0")]
    )
    def test_a_store_that_is_turned_off_is_told_before_anything_is_done(
        self, run, files, tmp_path, cache_dir, monkeypatch, name, value
    ):
        monkeypatch.setenv(name, value)
        index = tmp_path / "new.index"
        error = run("index", files, "--out", index, "--precompute", "context_experts", "--json").error
        assert error["type"] == "ConfigError"
        assert error["message"].startswith(
            "--precompute needs a passage KV store on disk or in Redis, and the settings turn both off; set "
            "RAG_POSFIX_PASSAGES_ENABLED=true and "
        )
        assert not index.exists()
        assert not (cache_dir / "passages").exists()

    def test_an_unknown_method_is_told_before_anything_is_done(self, run, files, tmp_path):
        error = run("index", files, "--out", tmp_path / "new.index", "--precompute", "pines", "--json").error
        assert error["type"] == "UnknownNameError"
        assert not (tmp_path / "new.index").exists()

    def test_a_method_that_does_not_read_apart_leaves_the_index_and_no_store(self, run, files, tmp_path, cache_dir):
        index = tmp_path / "new.index"
        error = run("index", files, "--out", index, "--precompute", "none", "--json").error
        assert error["type"] == "ConfigError"
        assert error["message"].startswith("none does not read passages independently of each other on SmolLM2-135M")
        assert index.exists()
        assert not (cache_dir / "passages").exists(), "or later questions would be written to disk"

    def test_a_folder_that_cannot_be_made_is_one_line(self, run, files, tmp_path, cache_dir):
        (cache_dir / "passages").write_text("in the way")
        error = run("index", files, "--out", tmp_path / "i", "--precompute", "context_experts", "--json").error
        assert error["type"] == "ConfigError"
        assert error["message"].startswith(
            f"the folder of the passage KV store, '{cache_dir / 'passages'}', cannot be created: "
        )


@pytest.mark.weights
class TestAsk:
    def test_json_holds_the_answer_and_where_it_comes_from(self, run, index):
        result = run("ask", QUESTION, "--index", index, "--max-tokens", "16", "--json")
        assert result.code == 0
        found = result.json
        assert {"answer", "documents", "citations", "usage", "cached", "mitigation", "order", "timings"} <= set(found)
        assert "Ilse Korvanth" in found["answer"]
        assert (found["mitigation"], found["order"], found["cached"]) == ("context_experts", "relevance", False)
        assert [document["position"] for document in found["documents"]] == [0, 1, 2]
        assert set(found["documents"][0]) == {
            "id", "score", "position", "attention", "title", "source", "page", "text"
        }  # fmt: skip
        assert found["documents"][0]["id"] == "lighthouse"
        assert found["documents"][0]["attention"] > 0.5
        assert found["citations"][0]["document_ids"] == ["lighthouse"]
        assert set(found["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
        assert {"retrieve", "assemble", "cache", "prefill", "decode"} == set(found["timings"])

    def test_the_second_time_the_answer_comes_from_the_cache_unless_told_otherwise(self, run, index):
        arguments = ["ask", QUESTION, "--index", index, "--max-tokens", "4", "--json"]
        assert run(*arguments).json["cached"] is False
        assert run(*arguments).json["cached"] is True
        assert run(*arguments, "--no-cache").json["cached"] is False

    def test_the_options_choose_method_order_and_number(self, run, index):
        found = run(
            "ask", QUESTION, "--index", index, "--mitigation", "context_experts:experts=1:pool=max", "--order",
            "reverse", "--k", "2", "--max-tokens", "1", "--json",
        ).json  # fmt: skip
        assert (found["order"], len(found["documents"])) == ("reverse", 2)
        assert found["documents"][0]["score"] < found["documents"][1]["score"]
        assert found["usage"]["completion_tokens"] == 1

    def test_a_reranker_chooses_among_what_was_retrieved(self, run, index):
        options = ["--reranker", "likelihood:batch_size=2", "--k", "1", "--max-tokens", "2", "--no-cache", "--json"]
        found = run("ask", QUESTION, "--index", index, *options).json
        assert [document["id"] for document in found["documents"]] == ["lighthouse"]
        assert 0 < found["documents"][0]["score"] < 1
        assert "rerank" in found["timings"]

    def test_passages_may_be_found_by_words_or_by_both(self, run, index):
        arguments = ["ask", QUESTION, "--index", index, "--max-tokens", "2", "--no-cache", "--json", "--retriever"]
        dense, words, both = (run(*arguments, name).json["documents"] for name in ("dense", "bm25", "hybrid"))
        assert {one["id"] for one in words} <= {one["id"] for one in dense} == {one["id"] for one in both}
        assert [one["score"] for one in both] != [one["score"] for one in dense]
        error = run(*arguments, "sparse").error
        assert error["type"] == "ConfigError"
        assert "retriever" in error["message"]

    def test_without_json_answer_and_sources_are_printed(self, run, index):
        plain = run("ask", QUESTION, "--index", index, "--max-tokens", "16")
        streamed = run("ask", QUESTION, "--index", index, "--max-tokens", "16", "--stream", "--no-cache")
        for result in (plain, streamed):
            assert result.code == 0
            assert "Ilse Korvanth" in result.out
            assert "1. lighthouse: " in result.out
            assert "prompt tokens" in result.out
        assert plain.out.splitlines()[0] == streamed.out.splitlines()[0]

    @pytest.mark.parametrize(
        ("options", "kind", "part"),
        [
            (["--mitigation", "pines"], "UnknownNameError", "unknown mitigation 'pines'. Did you mean 'pine'"),
            (["--mitigation", "none:x=1"], "ConfigError", "none has no parameter 'x'. It takes: none"),
            (["--mitigation", "none:x"], "ConfigError", "'x' in mitigation 'none:x' must be parameter=value"),
            (["--order", "revers"], "UnknownNameError", "Did you mean 'reverse'"),
            (["--reranker", "likelyhood"], "UnknownNameError", "Did you mean 'likelihood'"),
            (["--reranker", "likelihood:batch=2"], "ConfigError", "Did you mean 'batch_size'"),
            (["--reranker", "likelihood:batch_size=0"], "ConfigError", "likelihood: batch_size=0: "),
            (
                ["--model", "/no/such/model"],
                "ConfigError",
                "model '/no/such/model' cannot be loaded: there is no such folder",
            ),
        ],
    )
    def test_what_cannot_be_done_is_one_line(self, run, index, options, kind, part):
        error = run("ask", QUESTION, "--index", index, *options, "--json").error
        assert error["type"] == kind
        assert part in error["message"]

    def test_an_empty_question_is_refused(self, run, index):
        assert run("ask", " ", "--index", index, "--json").error["type"] == "ConfigError"

    def test_a_folder_that_is_no_index_is_refused(self, run, tmp_path):
        for folder in (tmp_path, tmp_path / "missing"):
            error = run("ask", QUESTION, "--index", folder, "--json").error
            assert error["type"] == "RetrievalError"
            assert str(folder) in error["message"]

    def test_a_truncated_index_is_refused_whichever_file_was_cut(self, run, index, tmp_path):
        names = [path.name for path in index.iterdir()]
        assert len(names) >= 3
        for name in names:
            copy = tmp_path / name / "copy.index"
            copy.mkdir(parents=True)
            for path in index.iterdir():
                data = path.read_bytes()
                (copy / path.name).write_bytes(data[: len(data) // 2] if path.name == name else data)
            error = run("ask", QUESTION, "--index", copy, "--json").error
            assert error["type"] == "RetrievalError", name


class TestCache:
    def test_an_empty_cache_holds_nothing(self, run):
        found = run("cache", "stats", "--json").json
        assert [tier["name"] for tier in found["tiers"]] == ["memory", "disk"]
        assert [tier["entries"] for tier in found["tiers"]] == [0, 0]
        assert [tier["name"] for tier in found["passages"]["tiers"]] == ["memory"]
        assert found["passages"]["bytes"] == 0
        assert run("cache", "clear", "--json").json == {"cleared": 0, "cleared_passages": 0}

    def test_answers_are_counted_and_cleared(self, run, cache_dir):
        from rag_posfix.caching.answers.build import build_answer_cache
        from rag_posfix.settings import CacheSettings

        cache = build_answer_cache(CacheSettings(), cache_dir)
        cache.put("one", {"text": "1"})
        cache.put("two", {"text": "2"})
        cache.close()
        assert run("cache", "stats", "--json").json["tiers"][1]["entries"] == 2
        assert "disk" in run("cache", "stats").out
        assert run("cache", "clear").out == "dropped 2 answers and 0 passages\n"
        assert run("cache", "stats", "--json").json["tiers"][1]["entries"] == 0

    def test_a_cache_that_is_turned_off_is_an_error(self, run, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_CACHE_ENABLED", "false")
        assert run("cache", "stats", "--json").error["type"] == "CacheError"
        assert run("cache", "clear", "--json").error["type"] == "CacheError"

    def test_passages_on_disk_are_counted_and_cleared(self, run, cache_dir, monkeypatch):
        from rag_posfix.caching.kv.build import build_passage_store
        from rag_posfix.settings import PassageStoreSettings
        from tests.support.passages import entry

        monkeypatch.setenv("RAG_POSFIX_PASSAGES_DISK_BYTES", "1000000")
        store = build_passage_store(PassageStoreSettings(), cache_dir)
        store.put_many({"one": entry(1), "two": entry(2), "three": entry(3)})
        store.close()
        found = run("cache", "stats", "--json").json["passages"]
        assert [(tier["name"], tier["entries"]) for tier in found["tiers"]] == [("memory", 0), ("disk", 3)]
        assert found["bytes"] == found["tiers"][1]["bytes"] > 3 * entry().n_bytes
        assert "passages" in run("cache", "stats").out
        monkeypatch.setenv("RAG_POSFIX_CACHE_ENABLED", "false")
        assert run("cache", "stats", "--json").json["tiers"] == []
        assert run("cache", "clear", "--json").json == {"cleared": 0, "cleared_passages": 3}
        assert run("cache", "stats", "--json").json["passages"]["bytes"] == 0

    def test_a_passage_store_that_is_turned_off_is_none(self, run, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_ENABLED", "false")
        assert run("cache", "stats", "--json").json["passages"] is None
        assert run("cache", "clear", "--json").json == {"cleared": 0, "cleared_passages": 0}

    def test_a_bound_that_holds_nothing_is_an_error(self, run, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_PASSAGES_DISK_BYTES", "10")
        error = run("cache", "stats", "--json").error
        assert (error["type"], "max_bytes=10 must be >= 65536" in error["message"]) == ("CacheError", True)


@pytest.mark.weights
class TestVerify:
    def test_json_says_how_exact_the_hook_is_and_what_is_supported(self, run):
        found = run("verify", "--json").json
        assert (found["model"], found["family"]) == ("SmolLM2-135M-Instruct", "llama")
        assert found["max_logit_difference"] < 0.02
        assert {"none", "context_experts"} <= set(found["supported"])
        assert isinstance(found["refused"], dict)

    def test_without_json_it_is_text(self, run):
        result = run("verify")
        assert result.code == 0
        assert "supported: " in result.out

    def test_a_model_that_cannot_be_loaded_is_one_line(self, run, tmp_path):
        assert run("verify", "--model", tmp_path, "--json").error["type"] == "ConfigError"


class TestProbe:
    @pytest.mark.weights
    def test_positional_dimensions_writes_a_profile_that_hidden_scaling_reads(self, run, tmp_path):
        found = run(
            "probe",
            "positional-dimensions",
            "--out",
            tmp_path,
            "--strings",
            3,
            "--tokens",
            128,
            "--factor",
            0,
            "--json",
        ).json
        assert set(found) == {"profile", "svg", "png", "channel", "factor", "layers", "candidates"}
        assert found["candidates"][0]["channel"] == found["channel"]
        assert found["layers"] == [9, 23]
        written = json.loads(Path(found["profile"]).read_text())
        assert written["model"] == "SmolLM2-135M-Instruct"
        assert written["settings"] == {"strings": 3, "tokens": 128, "seed": 0}
        method = MITIGATIONS.create(
            with_file_parameters(MethodSpec("hidden_scaling", {"profile": found["profile"]}), MITIGATIONS)
        )
        assert (method.channel, method.factor, method.last_layer) == (found["channel"], 0.0, 23)

    def test_a_factor_out_of_range_is_told_before_a_model_is_loaded(self, run, tmp_path):
        error = run("probe", "positional-dimensions", "--out", tmp_path, "--factor", 99, "--json").error
        assert error["message"] == "hidden_scaling: factor=99.0 must be a number between -10 and 10"


def write_rows(folder):
    rows = [
        {
            "question": f"what is the capital of {country}",
            "answers": [capital],
            "ctxs": [
                {"title": name, "text": f"{city} is the capital of {name}.", "isgold": name == country}
                for name, city in (("Ostrel", "Venna"), ("Maravel", "Tull"), ("Sorrin", "Korva"))
            ],
        }
        for country, capital in (("Ostrel", "Venna"), ("Maravel", "Tull"))
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.mark.weights
class TestEvalPositions:
    def test_json_is_the_summary_and_the_record_holds_every_row(self, run, tmp_path):
        found = run(
            "eval", "positions", "--data", write_rows(tmp_path), "--mitigation", "none,context_experts",
            "--gold-positions", "0,2", "--documents", "3", "--max-tokens", "6", "--out", tmp_path / "out", "--json",
        ).json  # fmt: skip
        assert {"mitigations", "closed_book", "gold_only", "n", "record"} <= set(found)
        assert found["n"] == 2
        assert list(found["mitigations"]) == ["none", "context_experts"]
        for one in found["mitigations"].values():
            assert list(one["positions"]) == ["0", "2"]
            assert {"accuracy", "log_probability"} <= set(one["positions"]["0"])
            assert {"worst", "mean", "spread", "ci95"} <= set(one)
        assert found["mitigations"]["context_experts"]["spread_log_probability"] < 0.05
        assert found["gold_only"]["log_probability"] > found["closed_book"]["log_probability"]
        record = read_record(Path(found["record"]))
        assert len(record.rows) == 2 * (2 + 2 * 2)
        assert {"versions", "git", "model", "dtype", "device", "data", "template", "mitigations"} <= set(record.head)

    def test_without_json_it_is_a_table(self, run, tmp_path):
        result = run(
            "eval", "positions", "--data", write_rows(tmp_path), "--gold-positions", "0", "--documents", "2",
            "--limit", "1", "--max-tokens", "2", "--out", tmp_path / "out",
        )  # fmt: skip
        assert result.code == 0
        assert "gold at 0" in result.out
        assert "closed_book: " in result.out

    @pytest.mark.parametrize(
        ("options", "kind", "part"),
        [
            (["--gold-positions", "0,x"], "ConfigError", "--gold-positions '0,x' must be numbers separated by commas"),
            (["--mitigation", "none,pines"], "UnknownNameError", "unknown mitigation 'pines'"),
            (["--documents", "9"], "EvaluationError", "documents=9 must be between 1 and 3"),
            (["--skip", "2"], "EvaluationError", "holds no rows after the first 2"),
        ],
    )
    def test_what_cannot_be_done_is_one_line(self, run, tmp_path, options, kind, part):
        error = run(
            "eval", "positions", "--data", write_rows(tmp_path), "--out", tmp_path / "out", "--documents", "3",
            "--gold-positions", "0", *options, "--max-tokens", "2", "--json",
        ).error  # fmt: skip
        assert error["type"] == kind
        assert part in error["message"]
        assert not (tmp_path / "out").exists()


@pytest.mark.weights
class TestSplitModel:
    """`--tp`: letters stand for tokens and the weights are random, so answers are noise, but the same noise."""

    @pytest.fixture
    def model(self, tmp_path):
        return save_tiny(tmp_path / "tiny", max_position_embeddings=4096)

    @pytest.fixture(autouse=True)
    def _exact(self, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_DTYPE", "float32")

    def arguments(self, index, model):
        return ["ask", QUESTION, "--index", index, "--model", model, "--max-tokens", 6, "--no-cache", "--json"]

    def test_two_processes_answer_as_one_does(self, run, index, model):
        one = run(*self.arguments(index, model)).json
        two = run(*self.arguments(index, model), "--tp", 2).json
        for key in ("answer", "usage", "mitigation"):
            assert two[key] == one[key]
        shares = [[document["attention"] for document in answer["documents"]] for answer in (one, two)]
        assert shares[1] == pytest.approx(shares[0], abs=1e-4)

    @pytest.mark.slow
    def test_torchrun_starts_the_processes_and_only_the_first_one_speaks(self, run, index, model):
        one = run(*self.arguments(index, model)).json
        found = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "rag_posfix.cli.main", *map(str, self.arguments(index, model)), "--tp", "2"],
            capture_output=True, text=True, cwd=ROOT, timeout=200,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr
        (line,) = found.stdout.splitlines()
        assert json.loads(line)["answer"] == one["answer"]

    def test_a_number_that_the_heads_cannot_be_dealt_to_is_told_before_anything_starts(self, run, index, model):
        error = run(*self.arguments(index, model), "--tp", 3).error
        assert error["type"] == "ConfigError"
        assert "tp=3 cannot split" in error["message"]
        assert "2 key/value heads" in error["message"]
        assert error["message"].endswith("allowed: 1, 2")


class TestBench:
    SMALL = ("--documents", "2", "--tokens", "20", "--repeats", "1", "--new-tokens", "1")

    def test_json_holds_the_stock_model_and_the_ratios_of_every_method(self, run, tmp_path, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_DTYPE", "float32")
        model = save_tiny(tmp_path / "tiny", max_position_embeddings=1024)
        found = run("bench", *self.SMALL, "--model", model, "--out", tmp_path, "--json").json
        assert set(found["unmodified"]) >= {"ttft_s", "decode_tokens_per_s", "peak_memory_bytes"}
        assert found["unmodified"]["ttft_s"] > 0
        assert found["unmodified"]["decode_tokens_per_s"] > 0
        assert {"none", "parallel_windows", "context_experts"} <= set(found["methods"])
        assert set(found["methods"]) | set(found["refused"]) == set(MITIGATIONS.names())
        for ratios in found["methods"].values():
            assert set(ratios) >= {"ttft_cold_ratio", "ttft_warm_ratio", "decode_ratio", "memory_ratio"}
            assert ratios["ttft_cold_ratio"] > 0
            assert ratios["decode_ratio"] > 0
            assert ratios["ttft_warm_ratio"] is None or ratios["ttft_warm_ratio"] > 0
        kept = {name for name, ratios in found["methods"].items() if ratios["ttft_warm_ratio"] is not None}
        assert {"none", "parallel_windows", "parallel_encoding", "context_experts", "blended"} <= kept
        assert found["methods"]["none"]["ttft_warm_ratio"] == found["methods"]["none"]["ttft_warm_memory_ratio"]
        assert not set(found["methods"]) & set(found["refused"])
        assert (found["device"], found["documents"], found["tokens_per_document"]) == ("cpu", 2, 20)
        assert found["dtype"] == "float32"
        record = read_record(Path(found["record"]))
        assert record.summary["methods"] == found["methods"]
        # One round: unmodified before, between and after the methods.
        assert len(record.rows) == 2 * len(found["methods"]) + 1
        assert {"versions", "git", "threads", "settings", "model_fingerprint"} <= set(record.head)

    def test_without_json_it_is_a_table_of_the_methods_that_were_asked_for(self, run):
        result = run("bench", *self.SMALL, "--mitigation", "context_experts:experts=1")
        assert result.code == 0
        assert "context_experts:experts=1" in result.out
        assert "parallel_windows" not in result.out
        assert "tokens/s" in result.out

    @pytest.mark.parametrize(
        ("options", "kind", "part"),
        [
            (["--mitigation", "none,pine-apple"], "UnknownNameError", "unknown mitigation 'pine-apple'"),
            (["--tokens", "1"], "EvaluationError", "documents=2 and tokens=1 must be at least 1 and 2"),
            (["--documents", "9000"], "PromptTooLongError", "but the context window is 8192; use fewer documents"),
        ],
    )
    def test_what_cannot_be_done_is_one_line(self, run, options, kind, part):
        error = run("bench", *self.SMALL, *options, "--json").error
        assert error["type"] == kind
        assert part in error["message"]


class TestDemo:  # tests/integration/test_wheel.py runs it
    def test_an_unknown_method_is_one_line(self, run):
        assert run("demo", "--mitigation", "pines", "--json").error["type"] == "UnknownNameError"
