"""``--tp``: a model that several processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import save_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


QUESTION = "Who designed the Maravel lighthouse?"


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

    @pytest.mark.slow
    def test_two_processes_answer_as_one_does(self, run, index, model):
        one = run(*self.arguments(index, model)).json
        two = run(*self.arguments(index, model), "--tp", 2).json
        for key in ("answer", "usage", "mitigation"):
            assert two[key] == one[key]
        shares = [[document["attention"] for document in answer["documents"]] for answer in (one, two)]
        assert shares[1] == pytest.approx(shares[0], abs=1e-4)

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
