"""``verify``, ``probe``, ``eval positions``, ``bench`` and ``demo``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from benchmarks.chat_models import tiny_config, tiny_model
from rag_posfix.cli import measure
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.evaluation.figures import CAPTIONS
from rag_posfix.evaluation.record import read_record
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.file_parameters import with_file_parameters
from tests.integration.capital_rows import write_capitals
from tests.support.tiny import VOCABULARY, save_tiny

pytestmark = pytest.mark.slow


@pytest.mark.weights
class TestVerify:
    def test_json_says_how_exact_the_hook_is_and_what_is_supported(self, run):
        found = run("verify", "--json").json
        assert (found["model"], found["family"]) == ("SmolLM2-135M-Instruct", "llama")
        assert found["max_logit_difference"] < 0.02
        assert (found["eos_ids"], found["generation_config_not_applied"]) == ([2], {})
        assert {"none", "context_experts"} <= set(found["supported"])
        assert isinstance(found["refused"], dict)

    def test_a_model_without_the_hook_says_how_rows_are_read_and_whether_keys_are_stored(self, run, tmp_path):
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=64)
        folder = save_tiny(tmp_path / "gpt2")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        result = run("verify", "--model", folder)
        assert "rows of a method: in one batch; passage KV store: serves it" in result.out

    def test_a_model_with_recurrent_layers_says_what_a_snapshot_takes(self, run, tmp_path, monkeypatch):
        monkeypatch.setenv("RAG_POSFIX_DTYPE", "float32")
        folder = save_tiny(tmp_path / "lfm2")
        tiny_model(tiny_config("lfm2", {"max_position_embeddings": 256})).save_pretrained(folder)
        found = run("verify", "--model", folder, "--json").json
        assert found["differences"]["snapshot"] < 1e-4
        few, many = found["snapshot_bytes"]["128"], found["snapshot_bytes"]["256"]
        # Keys and values of 2 layers with 2 heads of 16 channels in float32, for 128 further tokens.
        assert many - few == pytest.approx(128 * 2 * 2 * 2 * 16 * 4, abs=64)
        assert (
            "snapshots of its whole cache, 0.1 MB of 128 tokens and 0.1 MB of" in run("verify", "--model", folder).out
        )


class TestProbe:
    @pytest.mark.slow
    @pytest.mark.weights
    def test_positional_dimensions_writes_a_profile_that_hidden_scaling_reads(self, run, tmp_path):
        found = run(
            "probe", "positional-dimensions", "--out", tmp_path, "--strings", 3, "--tokens", 128, "--factor", 0,
            "--json",
        ).json  # fmt: skip
        assert set(found) == {"profile", "svg", "png", "channel", "factor", "layers", "candidates"}
        assert found["candidates"][0]["channel"] == found["channel"]
        assert found["layers"] == [9, 23]
        written = json.loads(Path(found["profile"]).read_text())
        assert written["model"] == "SmolLM2-135M-Instruct"
        assert written["settings"] == {"strings": 3, "tokens": 128, "pairs": 8, "prompts": 24, "seed": 0}
        method = MITIGATIONS.create(
            with_file_parameters(MethodSpec("hidden_scaling", {"profile": found["profile"]}), MITIGATIONS)
        )
        assert (method.channel, method.factor, method.last_layer) == (found["channel"], 0.0, 23)


@pytest.mark.slow
@pytest.mark.weights
def test_eval_positions_of_the_real_model_finds_the_answer_in_the_gold_passage(run, tmp_path):
    found = run(
        "eval", "positions", "--data", write_capitals(tmp_path), "--mitigation", "none", "--gold-positions", "0",
        "--documents", "2", "--limit", "1", "--max-tokens", "2", "--out", tmp_path / "out", "--json",
    ).json  # fmt: skip
    assert found["gold_only"]["log_probability"] > found["closed_book"]["log_probability"]


@pytest.mark.usefixtures("tiny")
class TestEvalPositions:
    def test_json_is_the_summary_and_the_record_holds_every_row(self, run, tmp_path):
        found = run(
            "eval", "positions", "--data", write_capitals(tmp_path), "--mitigation", "none,context_experts",
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
        assert found["gold_only"]["log_probability"] != found["closed_book"]["log_probability"]
        record = read_record(Path(found["record"]))
        assert len(record.rows) == 2 * (2 + 2 * 2)
        assert {"versions", "git", "model", "dtype", "device", "data", "template", "mitigations"} <= set(record.head)

    def test_without_json_it_is_a_table(self, run, tmp_path):
        result = run(
            "eval", "positions", "--data", write_capitals(tmp_path), "--gold-positions", "0", "--documents", "2",
            "--limit", "1", "--max-tokens", "2", "--out", tmp_path / "out",
        )  # fmt: skip
        assert result.code == 0
        assert "gold at 0" in result.out
        assert f"figure: {CAPTIONS['positions']}" in result.out
        assert "closed_book: " in result.out


@pytest.mark.usefixtures("tiny")
class TestBench:
    SMALL = ("--documents", "2", "--tokens", "20", "--repeats", "1", "--new-tokens", "1")

    @pytest.mark.slow
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


class TestDemo:
    @pytest.mark.usefixtures("tiny")
    def test_each_method_answers_at_three_places_and_the_default_answers_alike(self, run, monkeypatch):
        monkeypatch.setattr(measure, "PASSAGES", 4)
        monkeypatch.setattr(measure, "ANSWER_TOKENS", 8)
        monkeypatch.setattr(measure, "GOLD_POSITIONS", {"first": 0, "middle": 2, "last": 3})
        found = run("demo", "--questions", 1, "--json").json
        assert (found["model"], found["passages"]) == ("tiny", 52)
        assert [(row["mitigation"], row["gold"]) for row in found["rows"]] == [
            (name, place) for name in ("none", "default") for place in ("first", "middle", "last")
        ]
        corrected = [row for row in found["rows"] if row["mitigation"] == "default"]
        assert len({row["answer"] for row in corrected}) == 1
        logs = [row["log_probability"] for row in corrected]
        assert max(logs) - min(logs) < 0.05


@pytest.mark.weights
def test_the_speed_of_each_reader_that_is_here_is_measured(run):
    lines = run("models", "list", "--speed").out.splitlines()
    (row,) = [
        [cell.strip() for cell in line.split("\u2502")] for line in lines if "smollm2" in line and "SmolLM2" in line
    ]
    read, written = map(int, row[-4:-2])
    assert read > written > 0
