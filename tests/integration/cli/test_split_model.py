"""``--tp``: a model that several processes share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.redis_server import free_port
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

    def test_of_processes_that_torchrun_started_only_the_first_one_speaks(self, run, index, model, python, tmp_path):
        one = run(*self.arguments(index, model)).json
        command = ("-m", "rag_posfix.cli.main", *self.arguments(index, model), "--tp", 2)
        # torchrun names the processes of a group and their meeting point by these variables.
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'services'}"}
        started = []
        for rank in ("0", "1"):
            variables = {**os.environ, **paths, **group, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
            started.append(python.start(ROOT, *command, output=tmp_path / rank, environment=variables))
        try:
            assert [process.wait(200) for process in started] == [0, 0], (tmp_path / "0").read_text()
        finally:
            for process in started:
                process.kill()
        first, second = ((tmp_path / rank).read_text().splitlines() for rank in ("0", "1"))
        assert [json.loads(line)["answer"] for line in first if line.startswith("{")] == [one["answer"]]
        assert [line for line in second if line.startswith("{")] == []

    def test_a_number_that_the_heads_cannot_be_dealt_to_is_told_before_anything_starts(self, run, index, model):
        error = run(*self.arguments(index, model), "--tp", 3).error
        assert error["type"] == "ConfigError"
        assert "tp=3 cannot split" in error["message"]
        assert "2 key/value heads" in error["message"]
        assert error["message"].endswith("allowed: 1, 2")
