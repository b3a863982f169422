"""``rag-posfix probe slot-attention``, and the method that uses what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_posfix.assembly.orders import create_order
from rag_posfix.contracts.method_spec import MethodSpec
from rag_posfix.mitigations import MITIGATIONS
from rag_posfix.pipeline.file_parameters import order_with_values, with_file_parameters
from tests.integration.capital_rows import write_capitals
from tests.support.command_line import command_line


@pytest.fixture
def run(capsysbinary):
    return command_line(capsysbinary)


@pytest.mark.weights
class TestProbeSlotAttention:
    @pytest.mark.slow
    def test_the_profile_that_it_writes_is_read_by_the_method(self, run, tmp_path):
        code, out, _ = run(
            "probe",
            "slot-attention",
            "--data",
            write_capitals(tmp_path),
            "--documents",
            "3",
            "--out",
            tmp_path,
            "--json",
        )
        found = json.loads(out)
        assert code == 0
        assert found["n"] == 2
        assert len(found["slots"]) == 3
        assert all(value > 0 for value in found["slots"])
        record = json.loads(Path(found["profile"]).read_text("utf-8"))
        assert record["profile"] == found["slots"]
        assert {"model", "model_fingerprint", "data", "settings", "environment"} <= set(record)
        spec = MethodSpec("calibrated_attention", {"profile": found["profile"]})
        method = MITIGATIONS.create(with_file_parameters(spec, MITIGATIONS))
        assert method.profile == tuple(found["slots"])
        order = create_order(order_with_values(f"profile:file={found['profile']}"))
        assert order.slots == tuple(found["slots"])

    @pytest.mark.slow
    def test_without_json_it_is_a_table(self, run, tmp_path):
        code, out, _ = run(
            "probe", "slot-attention", "--data", write_capitals(tmp_path), "--documents", "2", "--limit", "1",
            "--out", tmp_path,
        )  # fmt: skip
        assert code == 0
        assert "relative to the mean" in out
        assert "--mitigation calibrated_attention:profile=" in out
        assert "--order profile:file=" in out


def test_too_few_passages_are_one_line(run, tmp_path):
    code, out, _ = run(
        "probe", "slot-attention", "--data", write_capitals(tmp_path), "--documents", "9", "--out", tmp_path, "--json"
    )
    assert code == 1
    assert json.loads(out)["error"]["type"] == "EvaluationError"
